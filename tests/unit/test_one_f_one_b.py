"""The order of 1F1B: every stage can go on, the bubble is that of the formula, and few batches wait."""

import itertools

import pytest

from ckdist.train.one_f_one_b import bubble, most_waiting, passes


def simulated(stages: int, chunks: int, batches: int) -> tuple[float, float]:
    """The time of a step and the sum of what stages compute: a forward pass takes 1, a backward pass 2, shared by the
    chunks. Messages of one kind are received in the order in which they are sent.
    """
    orders = [passes(stage, stages, chunks, batches) for stage in range(stages)]
    time, at, ended, busy, last = [0.0] * stages, [0] * stages, {}, 0.0, stages * chunks - 1
    while any(at[s] < len(orders[s]) for s in range(stages)):
        before = sum(at)
        for s in range(stages):
            while at[s] < len(orders[s]):
                backward, chunk, batch = orders[s][at[s]]
                number = chunk * stages + s
                source = (number + 1, batch, True) if backward and number < last else (number - 1, batch, False)
                if source[0] >= 0 and source not in ended:
                    break
                assert not backward or number == last or (number, batch, False) in ended
                seconds = (1 + 2 if number == last else 1 + backward) / chunks
                time[s] = max(time[s], ended.get(source, 0.0)) + seconds
                ended[number, batch, backward] = time[s]
                at[s], busy = at[s] + 1, busy + seconds
        assert sum(at) > before, "stages wait for one another"
    return max(time), busy


@pytest.mark.parametrize("stages, chunks", [(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (4, 3)])
def test_the_bubble_is_that_of_the_formula(stages, chunks):
    for batches in range(1, 13) if chunks == 1 else range(stages, 4 * stages + 1, stages):
        seconds, busy = simulated(stages, chunks, batches)
        if batches >= stages:
            assert stages * seconds / busy - 1 == pytest.approx(bubble(stages, chunks, batches))


@pytest.mark.parametrize("stages, chunks", [(2, 1), (4, 1), (2, 2), (3, 3)])
def test_no_more_batches_wait_however_many_there_are(stages, chunks):
    for stage in range(stages):
        few, many = (most_waiting(passes(stage, stages, chunks, n * stages), chunks) for n in (2, 9))
        assert few == many
        if chunks == 1:
            assert few == [0 if stage == stages - 1 else stages - stage]


@pytest.mark.parametrize("stages, chunks", [(3, 1), (3, 2)])
def test_each_batch_passes_each_chunk_once_and_in_order(stages, chunks):
    """So messages need no number, and a batch's place in what is kept is its number modulo the places."""
    for stage, batches in itertools.product(range(stages), (3, 9)):
        order = passes(stage, stages, chunks, batches)
        for backward, chunk in itertools.product((False, True), range(chunks)):
            found = [each.batch for each in order if (each.backward, each.chunk) == (backward, chunk)]
            has_loss = (stage, chunk) == (stages - 1, chunks - 1)
            assert found == ([] if has_loss and not backward else list(range(batches)))
