"""What an executable meets when it serves, driven from rank 0 while the other ranks work."""

import numpy as np

from ckdist.engine.engine import Engine
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.single import SingleSequence
from ckdist.program.step_batch import Batch


def driven(world, executable, body):
    """What `body(executable)` gives on rank 0, while the other ranks work."""
    if world.rank:
        executable.work()
        return None
    try:
        return body(executable)
    finally:
        executable.stop()  # or the others would wait after an error


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


def texts(engine) -> tuple[list[list[int]], dict]:
    """Greedy text of prompts, some at once, some with a prefix that is in the cache by then; and the engine's
    counters.
    """
    rng = np.random.default_rng(0)
    prompts = [(rng.integers(3, 180, n) % engine.vocab_size).tolist() for n in (50, 1, 2, 37)]
    prompts += [[*prompts[0][:40], 9, 8, 7], prompts[0]]
    found = {}
    for ids in ((0, 1, 2), (3, 4), (5,)):
        for i in ids:
            engine.add(i, prompts[i], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.id, []).extend(output.tokens)
    # 48 tokens of the last prompt; and 32 of the one before, but where a state per sequence has no snapshot there
    assert engine.stats()["cached_tokens_total"] >= 48 + (0 if "state_slots" in engine.stats() else 32)
    return [found[i] for i in range(len(prompts))], engine.stats()


def answers(executable, requests, prefix_reuse: bool, ends=()) -> tuple[list, Engine]:
    """Of each request its tokens and their log probabilities, two requests arriving per step.

    `ends`: tokens that end turns, and no answer.
    """
    engine, found = Engine(executable, Sampler(executable.vocab_size), ends, prefix_reuse=prefix_reuse), {}
    waiting = list(enumerate(requests))
    while waiting or engine.has_work:
        for id, (prompt, tokens) in waiting[:2]:
            engine.add(id, prompt, SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=2, ignore_eos=True))
        waiting = waiting[2:]
        for output in engine.step():
            found.setdefault(output.id, []).extend(zip(output.tokens, output.logprobs or [], strict=True))
    return [found[id] for id in range(len(requests))], engine
