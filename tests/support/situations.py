"""What a server's steps come to, for tests that run them in two ways and compare bits."""

import numpy as np

from ckdist.engine.single import SingleSequence
from ckdist.program.batch import Batch


def driven(world, executable, body):
    """What `body(executable)` gives on rank 0, while the other ranks work."""
    if world.rank:
        executable.work()
        return None
    result = body(executable)
    executable.stop()
    return result


def situations(executable) -> list[np.ndarray]:
    """Logits of a prompt in chunks, of decoding, of several prompts beside a decoding sequence and a reused prefix,
    of two tokens.
    """
    sequence, logits = SingleSequence(executable), []
    logits.append(sequence.feed(np.arange(40)))
    logits += [sequence.feed([token]).copy() for token in (3, 4, 5)]
    # 32 positions of the first sequence are the third's too
    runs = np.array([[5, 0, 1], [1, 43, 3], [2, 32, 3], [6, 10, 1]], np.int32)
    tables = np.array([8, *(0, 1, 2), *(0, 1, 9), 8], np.int32)
    ids = np.arange(50, 64, dtype=np.int32)
    logits.append(executable.run(Batch(ids[:8], runs[:3], tables[:7], np.array([4, 5, 7], np.int32))).copy())
    logits.append(
        executable.run(
            Batch(
                ids[8:],
                runs[[0, 1]] * 0 + [[3, 5, 1], [3, 34, 3]],
                np.array([8, 0, 1, 9], np.int32),
                np.array([0, 5], np.int32),
            )
        ).copy()
    )
    sequence.length = 0
    logits.append(sequence.feed([7, 8]))
    return logits
