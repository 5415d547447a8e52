"""Steps over prompts: several are in flight over stages, results come in order, and none stays in flight."""

from collections import deque

import numpy as np
import pytest

from ckdist.engine.prompt_scores import Piece, steps_of, windows


class Stages:
    """An executable of three stages whose logits are the wanted tokens."""

    max_outputs, num_blocks, max_sequences, state_slots, in_flight, failed = 32, 64, 2, 0, 4, False

    def __init__(self) -> None:
        self.steps, self.most = deque(), 0

    def publish(self, batch) -> None:
        self.steps.append(batch)
        self.most = max(self.most, len(self.steps))

    def collect(self) -> np.ndarray:
        batch = self.steps.popleft()
        return batch.token_ids[batch.logits_indices][:, None].astype(np.float32)


def pieces(document: int) -> list[Piece]:
    size = 100 if document % 4 == 3 else 5  # a long one takes several steps
    return [Piece(np.arange(size, dtype=np.int32) + 1000 * document, np.array([1, size - 2], np.int32))]


def test_steps_of_several_stages_overlap_and_come_in_order():
    stages, found = Stages(), []
    for count, logits in steps_of(stages, pieces, range(2, 12)):
        found.append((count, logits[:, 0].astype(int).tolist()))
    wanted = [token for document in range(2, 12) for token in pieces(document)[0].ids[[1, -2]].tolist()]
    assert [token for _, tokens in found for token in tokens] == wanted
    assert sum(count for count, _ in found) == 10 and stages.most == stages.in_flight and not stages.steps


def test_a_failure_leaves_no_step_in_flight():
    stages, steps = Stages(), 0
    with pytest.raises(ZeroDivisionError):
        for steps, _ in enumerate(steps_of(stages, pieces, range(12))):
            if steps == 2:
                raise ZeroDivisionError
    assert stages.most > 1  # the generator is closed by now
    assert not stages.steps


@pytest.mark.parametrize("context", [2, 3, 4, 7, 64])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_each_learned_token_is_scored_in_one_window_by_the_token_before_it(context, length):
    learned = np.arange(length) % 3 > 0
    found = windows(np.arange(length, dtype=np.int32), learned, context)
    assert all(len(piece.ids) <= context for piece in found)
    scored = np.concatenate([piece.ids[piece.wanted] for piece in found])
    assert scored.tolist() == (np.flatnonzero(learned) - 1).tolist()
