"""Products of few tiles on many threads: their columns are divided, and a row has the same bits in any batch, layout
and division of work.
"""

import sys

import numpy as np
import pytest

from ckdist.engine.single import SingleSequence
from ckdist.program.step_batch import Batch
from ckdist.weights.gguf_export import export_gguf
from tests.ranks.test_adapters import on_ranks, outputs, requests_of
from tests.support import two_states
from tests.support.adapters import random_adapter
from tests.support.checkpoints import write_model
from tests.support.programs.replay import build
from tests.support.served import write_tokenizer
from tests.support.situations import driven, situations
from tests.support.thread_ranks import run_threads

WIDE = {"hidden": 768, "ffn": 1040, "heads": 32, "kv_heads": 4}
MANY = 24  # threads; up to 16 divide no columns
STORED = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 768,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 404,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model in float32."""
    folder = tmp_path_factory.mktemp("stored")
    write_model(folder, STORED)
    write_tokenizer(folder)
    return folder


def logits_of(ranks, family, threads, body, chunk=24, **numbers):
    """body(executable) on rank 0. `threads`: of each rank."""

    def rank(world):
        *_, executable, _keep = build(world, family, "auto", threads[world.rank], chunk, 12, "f32", **WIDE | numbers)
        result = driven(world, executable, body)
        executable.close()
        return result

    return run_threads(ranks, rank)[0]


def in_chunks(executable):
    executable.prefill_from = sys.maxsize
    return SingleSequence(executable).feed(np.arange(40))[-1:].copy()


def in_chunks_and_one_by_one(executable):
    whole = in_chunks(executable)
    alone = SingleSequence(executable)
    for token in range(40):
        last = alone.feed([token])
    return whole, last.copy()


def tensor_and_token(executable):
    executable.prefill_from = sys.maxsize
    expected = situations(executable)
    executable.prefill_from = 0
    return expected, situations(executable)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "experts", "latent", "mamba2"])
def test_many_threads_have_the_bits_of_single_tokens_and_the_numbers_of_few(family):
    whole, alone = logits_of(1, family, [MANY], in_chunks_and_one_by_one)
    np.testing.assert_array_equal(whole, alone)
    few = logits_of(1, family, [2], in_chunks)
    np.testing.assert_allclose(whole, few, atol=2e-5 * np.abs(few).max())
    assert (whole != few).any()


@pytest.mark.parametrize("family, threads", [("llama", [MANY, MANY]), ("gemma2", [2, MANY, 1]), ("qwen3", [MANY, 2])])
def test_ranks_of_any_threads_agree_on_the_parts(family, threads):
    expected, found = logits_of(len(threads), family, threads, tensor_and_token)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_up_to_sixteen_rows_have_the_bits_of_single_rows_on_any_active_threads():
    threads = 40

    def in_pieces(executable):
        found = []
        for active, sizes in ((threads, [1] * 60), (threads, (16, 2, 3, 9, 15, 1, 14)), (5, (4, 5, 24, 7, 8, 10, 2))):
            executable.threads = executable.threads_batch = executable.single_threads = active
            sequence, ids = SingleSequence(executable), iter(range(60))
            found.append(np.concatenate([sequence.feed([next(ids) for _ in range(size)]) for size in sizes]))
        return found

    alone, *others = logits_of(1, "gemma2", [threads], in_pieces)
    for other in others:
        np.testing.assert_array_equal(other, alone)


@pytest.mark.parametrize(
    "hosts, threads, more", [("ab", [MANY, 2], {}), ("aabb", [2, MANY, 1, 20], {"prefill": "tensor", "heads": 8})]
)
def test_hosts_that_share_rows_out_have_the_bits_of_sums_over_all(hosts, threads, more):
    def both(executable):
        executable.prefill_from, executable.dispatch_from = 0, sys.maxsize
        expected = situations(executable)
        executable.dispatch_from = 0
        return expected, situations(executable), executable.dispatched_tokens

    expected, found, dispatched = logits_of(hosts, "experts", threads, both, experts="expert", **more)
    assert dispatched > 40
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("until", [0.37, 1.0])
def test_packing_that_runs_or_ended_does_not_change_bits(folder, until):
    expected, found = (
        run_threads(1, lambda world, until=until: two_states.logits(world, folder, until, MANY, False))[0][0]
        for until in (two_states.BEFORE, until)
    )
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_k"])
def test_sequences_of_stored_types_have_the_bits_of_each_alone(folder, tmp_path, kind):
    export_gguf(str(folder), str(tmp_path / "m.gguf"), kind)

    def rank(world):
        model = two_states.loaded(world, tmp_path / "m.gguf", two_states.BEFORE, MANY, parallel=32)
        found = [
            [
                model.executable.run(
                    Batch(
                        np.arange(first, first + count, dtype=np.int32),
                        np.array([[1, 0, 1]] * count, np.int32),
                        np.arange(count, dtype=np.int32),
                        np.arange(count, dtype=np.int32),
                        prompts=False,
                    )
                ).copy()
                for first in range(0, 32, count)
            ]
            for count in (1, 2, 8, 16, 32)
        ]
        model.executable.stop()
        model.executable.close()
        model.loader.close()
        return [np.concatenate(rows) for rows in found]

    alone, *others = run_threads(1, rank)[0]
    for other in others:
        np.testing.assert_array_equal(other, alone)


def test_adapters_in_one_batch_have_the_bits_of_each_alone(folder, tmp_path):
    for seed, name in enumerate(("x", "y")):
        random_adapter(tmp_path / name, str(folder), ("q_proj", "gate_proj", "down_proj"), seed, 4 + 13 * seed, 0.05)
    requests = requests_of(("x", "y", None, "x"))
    together, alone = on_ranks(
        1,
        lambda engine, _: (outputs(engine, requests), outputs(engine, requests, together=False)),
        model=folder,
        threads=MANY,
        lora=(f"x={tmp_path / 'x'}", f"y={tmp_path / 'y'}"),
        max_lora_rank=32,
    )
    assert together == alone
