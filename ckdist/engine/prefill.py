"""From how many tokens on a step with prompts is cut by tokens: asked of what a layer costs both ways (`layer_costs`).

Logits are the same bits either way, so the answer is one of speed alone.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from ckdist.engine.layer_costs import LOST, WON, LayerCosts, load_costs, measure, save_costs
from ckdist.program.executable import DECODE, PREFILL, Executable


@dataclass(frozen=True)
class PrefillChoice:
    """Steps with prompts of at least `from_tokens` tokens are cut by tokens; `reason` is one line. `costs`: None where nothing was asked."""

    from_tokens: int
    reason: str
    costs: LayerCosts | None = None

    def predicted(self, steps: list[tuple[int, int]], layers: int) -> float | None:
        """Seconds of the layers of steps, each of a phase and so many tokens, without context before them; None where nothing is known."""
        return None if self.costs is None else layers * sum(self.costs.predicted(phase, tokens) for phase, tokens in steps)

    def stats(self, executable: Executable) -> dict[str, float | str]:
        """For metrics: the reason, what was measured, the choice (0: never by tokens), and how many tokens of steps with prompts went either way."""
        counts = dict(enumerate(executable.prefill_tokens))
        numbers = {
            "prefill_choice_info": self.reason,
            "prefill_by_token_from": 0 if self.from_tokens == sys.maxsize else self.from_tokens,
            "prefill_by_token_tokens_total": counts.get(PREFILL, 0),
            "prefill_by_tensor_tokens_total": counts.get(DECODE, 0),
        }
        for phase, name in ((PREFILL, "token"), (DECODE, "tensor")) if self.costs else ():
            numbers[f"prefill_by_{name}_layer_seconds"] = self.costs.seconds[phase][-1]
            numbers[f"prefill_by_{name}_layer_bytes"] = self.costs.moved[phase][-1]
        return numbers


def choose_prefill(config, world, executable: Executable, key_of: Callable[[], dict], held, anew: bool = False) -> PrefillChoice:
    """Sets the executable's `prefill_from`; a collective call, before anything is in the cache.

    Where there is a choice it takes what is kept for `key_of()` (as of `layer_costs`), or else, or with `anew`, measures and keeps it; within `held()`
    this rank does nothing beside.
    """
    if executable.phases == 1:
        return PrefillChoice(sys.maxsize, "prefill cuts tensors" if world.size > 1 else "one rank, nothing cut")
    if config.prefill == "token":
        choice = PrefillChoice(0, "prefill cuts tokens, as --prefill says")
    else:
        key = key_of()
        kept = load_costs(key) if world.rank == 0 and not anew else None
        source = "measured before, from the cache"
        if not world.broadcast(kept is not None):
            with held():
                if world.rank:
                    executable.work()
                else:
                    kept = measure(executable)
                    executable.stop()
                    source = "measured now, and kept" if save_costs(key, kept) else "measured now" if kept.certain else "measured now, too unevenly to be kept: the next start measures again"
        told = world.broadcast(kept and [kept.sizes, kept.seconds, kept.moved, kept.ratios, kept.rounds, source])
        *numbers, rounds, source = told
        choice = _choose(LayerCosts(*(_tuples(part) for part in numbers), rounds), source)
    executable.prefill_from = choice.from_tokens
    return choice


def _choose(costs: LayerCosts, source: str) -> PrefillChoice:
    """From the largest step down, as long as cutting tokens is not surely slower, to the smallest where it surely is faster.

    What a size that is neither says is noise, and moves no threshold; where all do, tensors are cut.
    """
    from_tokens = sys.maxsize
    for size, (low, _, high) in reversed(list(zip(costs.sizes, costs.ratios))):
        if low >= LOST:
            break
        if high <= WON:
            from_tokens = size
    what = f"prefill cuts tokens from {from_tokens} tokens in a step on" if from_tokens < sys.maxsize else "prefill cuts tensors"
    each = lambda phase: f"{costs.seconds[phase][-1] * 1e3:.2f} ms, {costs.moved[phase][-1] / 1e6:.2f} MB read of other ranks"
    ratios = ", ".join(f"{ratio:.3f} ({low:.2f} to {high:.2f}) at {size}" for size, (low, ratio, high) in zip(costs.sizes, costs.ratios))
    return PrefillChoice(
        from_tokens,
        f"{what}: a layer of {costs.sizes[-1]} tokens takes {each(PREFILL)} with tokens cut, {each(DECODE)} with tensors cut; ratios of time {ratios} ({source})",
        costs,
    )


def _tuples(value):
    return tuple(_tuples(part) for part in value) if isinstance(value, (list, tuple)) else value
