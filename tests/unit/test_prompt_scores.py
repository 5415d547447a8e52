import numpy as np
import pytest

from ckdist.engine.prompt_scores import windows


@pytest.mark.parametrize("context", [2, 3, 4, 7, 64])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_each_learned_token_is_scored_in_one_window_by_the_token_before_it(context, length):
    learned = np.arange(length) % 3 > 0
    found = windows(np.arange(length, dtype=np.int32), learned, context)
    assert all(len(piece.ids) <= context for piece in found)
    scored = np.concatenate([piece.ids[piece.wanted] for piece in found])
    assert scored.tolist() == (np.flatnonzero(learned) - 1).tolist()
