"""The native replay means what the program means: any number of ranks and threads, over shared memory, MPI and TCP."""

import os
import subprocess
import sys

import numpy as np
import pytest

from ckdist.engine.single import SingleSequence
from ckdist.errors import NativeError
from ckdist.program.cache import block_bytes, slot_bytes
from ckdist.program.step_batch import Batch
from tests.support.levels import VECTORS, each
from tests.support.programs.replay import build, check
from tests.support.specs import LINEAR, PIECES
from tests.support.thread_ranks import run_threads

JOBS = (((1, 2), (3, 1)), ((2, 2), (7, 2)))  # ranks and threads


@pytest.mark.parametrize(
    "family, ranks, threads",
    [(family, *job) for i, family in enumerate(["gemma2", *PIECES, *LINEAR]) for job in JOBS[i % 2]],
)
def test_replay_with_ranks_as_threads(family, ranks, threads):
    assert run_threads(ranks, lambda world: check(world, family, "auto", threads, 16))[0] < 5e-7


@pytest.mark.parametrize("family", ["experts", "experts_in_groups", "sinks_and_biases"])
@pytest.mark.parametrize("hosts", [["one", "two"], ["one", "two", "two"], ["one", "one", "two", "two"]])
def test_hosts_with_whole_experts(family, hosts):
    """One rank each, unequal numbers, and two each, of which each has slices of its host's experts."""
    run = lambda world: check(world, family, "auto", 2, 16, experts="expert")
    assert run_threads(hosts, run)[0] < 5e-7


@pytest.mark.parametrize(
    "family, kv_type", [(family, ("i16/q8_0", "f16")[i % 2]) for i, family in enumerate(["qwen3", "unequal", *LINEAR])]
)
def test_a_cache_has_the_bytes_that_a_plan_counts(family, kv_type):
    """Seven ranks: some of them share kv-heads, and some have none."""

    def rank(world):
        *_, executable, _keep = build(world, family, "auto", 1, 16, 8, kv_type)
        config, caches = executable.config, executable.caches.values()
        counted = config.num_blocks * block_bytes(caches, config.types), config.state_slots * slot_bytes(caches)
        executable.stop() if world.rank == 0 else executable.work()
        allocated = executable.kv_bytes
        executable.close()
        return allocated, -(-counted[0] // 64) * 64 + counted[1]

    for allocated, counted in run_threads(7, rank):
        assert allocated == counted


@pytest.mark.parametrize("isa", each(VECTORS))
def test_linear_attention_on_every_level(isa):
    code = (
        "from ckdist.comm.world import SingleWorld; from tests.support.programs.replay import check; "
        f"print(max(check(SingleWorld(), family, 'auto', 2, 16) for family in {list(LINEAR)}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "CKDIST_ISA": isa}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and float(done.stdout) < 5e-7, done.stderr


@pytest.mark.parametrize("kv_type", ["f16", "i16", "q8_0", "i16/q8_0", "q8_0/f16"])
def test_long_contexts_shared_by_threads_keep_their_bits(kv_type):
    """Three threads cannot share three kv-heads of two ranks evenly, so they cut the context; one thread does not."""

    def run(threads):
        def rank(world):
            *_, executable, _keep = build(world, "qwen3", "auto", threads, 128, 96, kv_type)
            logits = None
            if world.rank == 0:
                sequence = SingleSequence(executable)
                sequence.feed(np.arange(1400) * 7 % 100)
                logits = np.stack([sequence.feed([i]).copy() for i in range(5)])
                executable.stop()
            else:
                executable.work()
            executable.close()
            return logits

        return run_threads(2, rank)[0]

    np.testing.assert_array_equal(run(3), run(1))


@pytest.mark.parametrize("family", ["experts", "latent", "sinks_and_biases"])
def test_384_threads_on_few_cores_give_the_bits_of_one(family):
    """They form groups of 16, which sleep in barriers and take items from each other."""

    def run(threads):
        def rank(world):
            *_, executable, _keep = build(world, family, "auto", threads, 64, 16, "i16")
            sequence = SingleSequence(executable)
            result = [sequence.feed(np.arange(40)), sequence.feed([3])]
            executable.close()
            return result

        return run_threads(1, rank)[0]

    for many, one in zip(run(384), run(1), strict=True):
        np.testing.assert_array_equal(many, one)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])  # gemma2 scales the rows of its table
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_of_embeddings_give_the_bits_of_their_token_ids(family, ranks):
    """Some tokens or all, with sharded tensors and, from `prefill_from` tokens on, with sharded tokens."""
    ids, blocks = np.arange(3, 43, dtype=np.int32), np.arange(3, dtype=np.int32)

    def rank(world):
        s, _, _, weights, executable, _keep = build(world, family, "auto", 2, 64, 8, "f16")
        found = []
        if world.rank == 0:
            rows = weights["model.embed_tokens.weight"][ids] * np.float32(s.embedding_scale or 1)
            tokens = np.array([[len(ids), 0, len(blocks)]], np.int32), blocks, np.arange(len(ids), dtype=np.int32)
            some = ids.copy()
            some[5:25] = -1 - np.arange(20)[::-1]
            for executable.prefill_from in (0, 1000):
                batches = (
                    Batch(ids, *tokens),
                    Batch(some, *tokens, embeddings=rows[5:25][::-1].copy()),
                    Batch(-1 - np.arange(len(ids), dtype=np.int32), *tokens, embeddings=rows),
                )
                found.append([executable.run(batch).copy() for batch in batches])
            with pytest.raises(NativeError, match="token id -41 is outside the vocabulary of 100 and 40 rows"):
                executable.run(Batch(some * 0 - 41, *tokens, embeddings=rows))
            executable.stop()
        else:
            executable.work()
        executable.close()
        return found

    for by_ids, *by_rows in run_threads(ranks, rank)[0]:
        for logits in by_rows:
            np.testing.assert_array_equal(logits, by_ids)
