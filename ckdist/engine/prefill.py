"""From how many tokens on a step with prompts is cut by tokens: asked of the machine, with the first layer of the model itself.

A cost model has few terms (operations at so many rows, bytes of weights, bytes exchanged, barriers), and one layer run both ways has all
of them in it, as they are on these ranks now. Logits are the same bits either way, so the answer is one of speed alone.
"""

import sys
import time
from dataclasses import dataclass

import numpy as np

from ckdist.program.batch import BLOCK_TOKENS, Batch
from ckdist.program.executable import DECODE, PREFILL, Executable

LEAST_TOKENS = 8  # of a step that is worth asking about
ROUNDS = 3
SECONDS = 1.0  # that measuring may take


@dataclass(frozen=True)
class PrefillChoice:
    """Steps with prompts of at least `from_tokens` tokens are cut by tokens; `reason` is one line.

    `layer_seconds` of the largest step that was measured, by phase; 0 where nothing was.
    """

    from_tokens: int
    reason: str
    layer_seconds: tuple[float, float] = (0.0, 0.0)

    def stats(self, executable: Executable) -> dict[str, float]:
        """For metrics: what was measured, the choice (0: never by tokens), and how many tokens of steps with prompts went either way."""
        counts = dict(enumerate(executable.prefill_tokens))
        return {
            "prefill_by_token_from": 0 if self.from_tokens == sys.maxsize else self.from_tokens,
            "prefill_by_token_layer_seconds": self.layer_seconds[PREFILL],
            "prefill_by_tensor_layer_seconds": self.layer_seconds[DECODE],
            "prefill_by_token_tokens_total": counts.get(PREFILL, 0),
            "prefill_by_tensor_tokens_total": counts.get(DECODE, 0),
        }


def choose_prefill(config, world, executable: Executable) -> PrefillChoice:
    """Measures where there is a choice, and sets the executable's `prefill_from`. A collective call, before anything is in the cache."""
    if executable.phases == 1:
        return PrefillChoice(sys.maxsize, "prefill cuts tensors" if world.size > 1 else "one rank, nothing cut")
    if config.prefill == "token":
        choice = PrefillChoice(0, "prefill cuts tokens, as --prefill says")
    elif world.rank == 0:
        choice = _measure(executable)
        executable.stop()
    else:
        executable.work()
        choice = None
    if config.prefill == "auto":
        values = world.broadcast(None if choice is None else [choice.from_tokens, choice.reason, list(choice.layer_seconds)])
        choice = PrefillChoice(values[0], values[1], tuple(values[2]))
    executable.prefill_from = choice.from_tokens
    return choice


def _measure(executable: Executable) -> PrefillChoice:
    """From the largest step down, as long as cutting tokens is faster."""
    most = min(executable.max_tokens, executable.context_length, executable.num_blocks * BLOCK_TOKENS)
    sizes = [most]
    while sizes[-1] // 2 >= LEAST_TOKENS:
        sizes.append(sizes[-1] // 2)
    begin, from_tokens, largest = time.monotonic(), sys.maxsize, None
    for size in sizes:
        seconds, moved = _layer(executable, size)
        if largest is None:
            largest = size, seconds, moved
        if seconds[PREFILL] >= seconds[DECODE]:
            break
        from_tokens = size
        if time.monotonic() - begin > SECONDS:
            break
    size, seconds, moved = largest
    what = f"prefill cuts tokens from {from_tokens} tokens in a step on" if from_tokens < sys.maxsize else "prefill cuts tensors"
    each = lambda phase: f"{seconds[phase] * 1e3:.2f} ms, {moved[phase] / 1e6:.2f} MB read of other ranks"
    reason = f"{what}: a layer of {size} tokens takes {each(PREFILL)} with tokens cut, {each(DECODE)} with tensors cut"
    executable.times(reset=True)
    return PrefillChoice(from_tokens, reason, (seconds[DECODE], seconds[PREFILL]))


def _layer(executable: Executable, size: int) -> tuple[dict, dict]:
    """The least seconds of the first layer by phase, and the bytes that it moves."""
    ids = np.arange(size, dtype=np.int32) % executable.vocab_size
    blocks = np.arange(-(-size // BLOCK_TOKENS), dtype=np.int32)
    batch = Batch(ids, np.array([[size, 0, len(blocks)]], np.int32), blocks, np.zeros(0, np.int32))
    seconds, moved = {DECODE: float("inf"), PREFILL: float("inf")}, {}
    for _ in range(ROUNDS):
        for phase in seconds:
            executable.times(reset=True)
            executable.run_layer(batch, phase)
            times = executable.times()
            seconds[phase], moved[phase] = min(seconds[phase], times.total), times.moved
    return seconds, moved
