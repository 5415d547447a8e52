"""Chooses the number of tokens from which on a step with prompts runs token-parallel.

A cost model (`cost`) predicts the gain. Only sizes with enough predicted gain are measured (`measured_cost`). Both
variants give the same bits, so only speed matters.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.planning.cost import CostModel
from ckdist.planning.measured_cost import LayerCosts, load_costs, measure, save_costs, sizes_of
from ckdist.planning.paired_test import LEAST_GAIN, NOISY, UNSEEN
from ckdist.program.executable import DECODE, PREFILL, Executable, StageRanks

# Fraction of the time: 600 pairs show it in nine of ten cases if runs vary by a half (`paired_test.pairs_for`).
WORTH_MEASURING = 0.1
# The same for a mixture of experts. Each rank also gathers, quantises and adds the rows of each expert, which the cost
# model lacks. So it is measured unless it is predicted to be slower.
MIXTURE_WORTH_MEASURING = 0.0


@dataclass(frozen=True)
class PrefillChoice:
    """The choice for steps with prompts."""

    from_tokens: int  # steps with at least this number of tokens run token-parallel
    reason: str  # the choice and its reason, in a few words
    details: str = ""  # all numbers, in one line; "" if there are none
    costs: LayerCosts | None = None  # None: not measured
    relative: float = 1.0  # cost of the mean layer / cost of the first, which is measured

    def predicted(self, steps: list[tuple[int, int]], layers: int) -> float | None:
        """Seconds of all layers in steps (phase, tokens) without context; None without a measurement."""
        if self.costs is None:
            return None
        return layers * self.relative * sum(self.costs.predicted(phase, tokens) for phase, tokens in steps)

    def stats(self, executable: Executable) -> dict[str, float | str]:
        """Values for metrics: reason, measurement, threshold (0: none), and tokens of steps with prompts by layout."""
        counts = dict(enumerate(executable.prefill_tokens))
        numbers: dict[str, float | str] = {
            "prefill_choice_info": self.reason,
            "prefill_by_token_from": 0 if self.from_tokens == sys.maxsize else self.from_tokens,
            "prefill_by_token_tokens_total": counts.get(PREFILL, 0),
            "prefill_by_tensor_tokens_total": counts.get(DECODE, 0),
        }
        if self.costs is not None:
            for phase, name in ((PREFILL, "token"), (DECODE, "tensor")):
                numbers[f"prefill_by_{name}_layer_seconds"] = self.costs.seconds[phase][-1]
                numbers[f"prefill_by_{name}_layer_bytes"] = self.costs.moved[phase][-1]
        return numbers


def choose_prefill(
    config: EngineConfig,
    world: World,
    executable: Executable,
    models: list[CostModel],
    key_of: Callable[[], dict[str, Any]],
    held: Callable[[], AbstractContextManager[Any]],
    remeasure: bool = False,
    unmeasured: str = "",
) -> PrefillChoice:
    """Sets the executable's `prefill_from`. A collective call, while the cache is empty.

    Costs that are stored for the key have precedence. Else sizes with enough predicted gain are measured.

    Args:
        config: The settings.
        world: The ranks.
        executable: This rank's executable.
        models: Cost models of its plans.
        key_of: Makes the key of stored costs, by `measured_cost.key_of`.
        held: A context in which this rank does no other work.
        remeasure: Measure all sizes again.
        unmeasured: The reason to measure nothing without `remeasure`, such as threads that share cores, or "".
    """
    if executable.plans == 1:
        return PrefillChoice(sys.maxsize, _only_tensor(config, world, executable.stages))
    if config.prefill == "token":
        executable.prefill_from = 0
        return PrefillChoice(0, "token-parallel, as --prefill says")
    gains = predicted_gains(world, models, sizes_of(executable))
    worth = MIXTURE_WORTH_MEASURING if models[PREFILL].mixture else WORTH_MEASURING
    key = key_of()
    costs = load_costs(key) if world.rank == 0 and not remeasure else None
    kept = costs is not None
    asked = dict.fromkeys(gains) if remeasure else {} if unmeasured else promising(gains, worth)
    if world.broadcast(not kept and bool(asked)):
        with held():
            if world.rank:
                executable.work()
            else:
                costs = measure(executable, asked)
                executable.stop()
                save_costs(key, costs)
    fields = world.broadcast(
        costs and [costs.sizes, costs.seconds, costs.moved, costs.ratios, costs.pairs, costs.verdicts]
    )
    measured = LayerCosts(*map(_tuples, fields)) if fields else None
    weights_moved = max(world.gather(models[PREFILL].weights_moved()))
    choice = choose(gains, measured, world.broadcast(kept), unmeasured, weights_moved)
    choice = replace(choice, relative=max(world.gather(models[PREFILL].relative(max(gains)))))
    executable.prefill_from = choice.from_tokens
    return choice


def predicted_gains(world: World, models: list[CostModel], sizes: list[int]) -> dict[int, float]:
    """Size -> fraction of the slowest rank's time that token-parallel saves; negative if it is slower.

    A collective call.
    """
    rows = world.gather([[model.seconds(size) for size in sizes] for model in models])
    tensor, token = (
        [max(times) for times in zip(*(row[phase] for row in rows), strict=True)] for phase in (DECODE, PREFILL)
    )
    return {size: 1 - b / a for size, a, b in zip(sizes, tensor, token, strict=True)}


def promising(gains: dict[int, float], worth: float = WORTH_MEASURING) -> dict[int, float]:
    """Size -> expected gain, for the sizes to measure: from the largest down, until a gain is below `worth`."""
    found = {}
    for size in sorted(gains, reverse=True):
        if gains[size] < worth:
            break
        found[size] = max(gains[size], LEAST_GAIN)
    return found


def choose(
    gains: dict[int, float],
    costs: LayerCosts | None,
    kept: bool,
    unmeasured: str = "",
    weights_moved: float = 0.0,
) -> PrefillChoice:
    """The choice by the measurement; tensor-parallel without one.

    `weights_moved`: bytes of other ranks' weights that a rank reads in a token-parallel layer.
    """
    largest = max(gains)
    predicted = ", ".join(f"{percent(gain)} at {size}" for size, gain in sorted(gains.items()))
    if costs is None:
        doubt = ", too little to measure" if 0 < gains[largest] < WORTH_MEASURING else ""
        predicted_gain = f"predicted: token-parallel {percent(gains[largest])} at {largest}{doubt}"
        why = unmeasured or predicted_gain
        details = f"prefill: token-parallel is predicted to be {predicted}; nothing is measured"
        return PrefillChoice(sys.maxsize, f"tensor-parallel ({why})", details)
    from_tokens, gain = costs.from_tokens, 1 - costs.ratios[-1][1]
    measured = f"{'measured before' if kept else 'measured'}: {{}}{percent(gain)} at {costs.sizes[-1]}"
    if from_tokens < sys.maxsize:
        reason = f"token-parallel from {from_tokens} tokens ({measured.format('')})"
    elif costs.verdicts[-1] == NOISY:
        hidden = f"token-parallel, predicted {percent(gains[largest])} at {largest}"
        reason = f"tensor-parallel (too noisy here to measure {hidden})"
    else:
        doubt = ", within the noise" if costs.verdicts[-1] == UNSEEN else ""
        reason = f"tensor-parallel ({measured.format('token-parallel ')}{doubt})"
    rows = zip(costs.sizes, *costs.seconds, *costs.moved, costs.ratios, costs.pairs, costs.verdicts, strict=True)
    details = "; ".join(
        f"{size} tokens {verdict}, ratio {ratio:.3f} ({low:.3f} to {high:.3f}) of {pairs} pairs, "
        f"a layer {token * 1e3:.2f} ms with {token_bytes / 1e6:.2f} MB of activations "
        f"and {weights_moved / 1e6:.2f} MB of weights read of other ranks token-parallel, "
        f"{tensor * 1e3:.2f} ms with {tensor_bytes / 1e6:.2f} MB of activations tensor-parallel"
        for size, tensor, token, tensor_bytes, token_bytes, (low, ratio, high), pairs, verdict in rows
    )
    return PrefillChoice(
        from_tokens, reason, f"prefill: token-parallel is predicted to be {predicted}; measured: {details}", costs
    )


def percent(gain: float) -> str:
    """Formats a gain of 0.07 as "7 % faster"."""
    return f"{abs(gain) * 100:.0f} % {'slower' if gain < 0 else 'faster'}"


def _only_tensor(config: EngineConfig, world: World, stages: StageRanks | None) -> str:
    """The reason why there is no choice."""
    if world.size == 1:
        return "on one rank"
    if stages is not None and stages.communicator.size == 1:
        return "in stages of one rank each"
    if config.prefill == "tensor":
        return "tensor-parallel, as --prefill says"
    return "tensor-parallel (token-parallel needs ranks that share memory, evenly over hosts)"


def _tuples(value: Any) -> Any:
    """Converts lists, also nested ones, to tuples."""
    return tuple(_tuples(part) for part in value) if isinstance(value, (list, tuple)) else value


__all__ = ["PrefillChoice", "choose", "choose_prefill", "predicted_gains", "promising"]
