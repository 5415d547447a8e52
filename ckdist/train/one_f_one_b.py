"""In which order a stage computes its batches: 1F1B and interleaved 1F1B.

Narayanan et al. 2021, arXiv:2104.04473, section 2.2. A stage first runs some batches forward, then one forward and one
backward by turns, so that no more batches wait for their backward pass than there are stages. Where a stage has several
chunks of layers it takes as many batches as there are stages through its first one, then through the next one, and back
in the opposite order: to fill and to drain the pipeline takes less of the time, and more is sent.
"""

from collections import Counter
from typing import NamedTuple


class Pass(NamedTuple):
    """One batch through one chunk of a stage's. The model's last chunk has no forward pass of its own: its backward
    pass begins with it.
    """

    backward: bool
    chunk: int  # of the stage's
    batch: int  # of the step's


def passes(stage: int, stages: int, chunks: int, batches: int) -> list[Pass]:
    """What the stage of this number does in a step of so many batches, where each stage has so many chunks of layers.

    With several chunks `batches` is a multiple of `stages`.
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
    has_loss = lambda each: stage == stages - 1 and each.chunk == chunks - 1
    return [each for each in found if each.backward or not has_loss(each)]


def most_waiting(order: list[Pass], chunks: int) -> list[int]:
    """Of each chunk how many batches at most are between their two passes."""
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
    """The time in which a stage waits, as a part of that in which it computes: (S - 1) / (M V)."""
    return (stages - 1) / (batches * chunks)
