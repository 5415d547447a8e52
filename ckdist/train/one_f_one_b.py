"""The order in which a stage computes its batches: 1F1B and interleaved 1F1B.

Narayanan et al. 2021, arXiv:2104.04473, section 2.2. A stage runs some batches forward, then alternates one forward and
one backward pass. So no more batches wait for their backward pass than there are stages.

If a stage has several chunks of layers, it takes `stages` batches through its first chunk, then through the next, and
back in the opposite order. This shortens the filling and draining of the pipeline, and sends more.
"""

from collections import Counter
from typing import NamedTuple


class Pass(NamedTuple):
    """One batch through one chunk of a stage.

    The model's last chunk has no forward pass of its own: its backward pass begins with it.
    """

    backward: bool
    chunk: int  # index in the stage
    batch: int  # index in the step


def passes(stage: int, stages: int, chunks: int, batches: int) -> list[Pass]:
    """The passes of a stage in one step, in order.

    If there are several chunks of layers per stage, `batches` is a multiple of `stages`.
    """
    order = [
        (chunk, batch)
        for first in range(0, batches, stages)
        for chunk in range(chunks)
        for batch in range(first, min(first + stages, batches))
    ]
    forward = [Pass(False, *each) for each in order]
    backward = [Pass(True, chunks - 1 - chunk, batch) for chunk, batch in order]
    ahead = stages - 1 - stage
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    by_turns = [each for pair in zip(forward[ahead:], backward, strict=False) for each in pair]
    found = [*forward[:ahead], *by_turns, *backward[max(0, len(order) - ahead) :]]
    last = chunks - 1 if stage == stages - 1 else -1  # the chunk with the loss
    return [each for each in found if each.backward or each.chunk != last]


def most_waiting(order: list[Pass], chunks: int) -> list[int]:
    """By chunk: the largest number of batches between their forward and backward pass."""
    waiting: Counter[int] = Counter()
    most = [0] * chunks
    for each in order:
        if each.backward:
            waiting[each.chunk] -= waiting[each.chunk] > 0
        else:
            waiting[each.chunk] += 1
        most[each.chunk] = max(most[each.chunk], waiting[each.chunk])
    return most


def bubble(stages: int, chunks: int, batches: int) -> float:
    """Waiting time of a stage / its computing time: (S - 1) / (M V) for S stages, M batches and V chunks."""
    return (stages - 1) / (batches * chunks)
