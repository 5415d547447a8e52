"""Prefill with tokens sharded over ranks: the bits of TENSOR in every situation, the bytes that it moves, and when
it is chosen.
"""

import functools
import re
import sys

import numpy as np
import pytest

from ckdist.comm.thresholds import Thresholds, save_thresholds
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.model_engine import prefill_stats
from ckdist.engine.sampler import Sampler
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError
from ckdist.layout import TENSOR, TOKEN, TOKEN_IN_HOSTS
from ckdist.layouts.phase_layouts import layouts_for
from tests.support import thread_ranks
from tests.support.distinct_families import distinct_families, prefill_of
from tests.support.pairs import pairs
from tests.support.paths import GOLDEN
from tests.support.programs.replay import build
from tests.support.situations import driven, situations, texts
from tests.support.specs import FAMILIES, PIECES
from tests.support.thread_ranks import run_threads

EXPERTS = ("num_experts_per_tok", "moe_k", "moe_topk")
MIXTURES = [
    folder for folder in distinct_families() if any(name in (folder / "config.json").read_text() for name in EXPERTS)
]


def both_ways(executable):
    """Logits of tensor-parallel and token-parallel prefill, and how many tokens went either way."""
    executable.prefill_from = sys.maxsize
    expected = situations(executable)
    executable.prefill_from = 0
    return expected, situations(executable), list(executable.prefill_tokens)


SHAPES = [
    (2, 2, {}),
    (3, 1, {}),
    (4, 1, {"ffn": 40}),
    (4, 2, {"heads": 6, "kv_heads": 2}),
    (7, 1, {"heads": 4, "kv_heads": 1}),
]


@pytest.mark.parametrize(
    "family, ranks, threads, numbers",
    [
        (family, *SHAPES[(index + more) % len(SHAPES)])
        for index, family in enumerate([*FAMILIES, *PIECES])
        for more in (0, 2)  # two shapes for each family, four families or more for each shape
    ],
)
def test_bits_are_those_of_tensor(family, ranks, threads, numbers):
    def rank(world):
        *_, executable, _keep = build(world, family, "auto", threads, 16, 12, "i16", **numbers)

        result = driven(world, executable, both_ways)
        executable.close()
        return result

    expected, found, tokens = run_threads(ranks, rank)[0]
    assert tokens[0] == tokens[1] > 40
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pairs(
    {
        "family": ["llama", "qwen2", "qwen3", "gemma2"],
        "hosts, threads, numbers": [
            ((2, 2), 2, {"heads": 8, "kv_heads": 4}),
            ((2, 2), 1, {"ffn": 40, "heads": 2, "kv_heads": 1}),
            ((3, 3), 1, {}),
            ((2, 2, 2), 1, {"heads": 6, "kv_heads": 6}),
        ],
        "least": [0, 1 << 20],
    }
)
def test_bits_are_those_of_tensor_over_hosts(family, hosts, threads, numbers, least, tmp_path, monkeypatch):
    """Tokens sharded over the ranks of each host, tensors over hosts; `least`: bytes up to which sums go whole to every
    host, through one rank of each.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_thresholds(Thresholds(least, least, least))

    def rank(world):
        *_, executable, _keep = build(world, family, "tcp", threads, 16, 12, "i16", **numbers)
        assert executable.layouts == 2

        result = driven(world, executable, both_ways)
        executable.close()
        return result

    expected, found, tokens = thread_ranks.run_threads(
        [f"host {h}" for h, count in enumerate(hosts) for _ in range(count)], rank
    )[0]
    assert tokens[0] == tokens[1] > 40
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("ranks, tokens", [(2, 10), (3, 12), (3, 2)])
def test_bytes_moved_are_those_of_the_formula(ranks, tokens):
    """By tokens: each rank reads the others' q, k and v of its heads, and the others' outputs for its tokens; by
    tensors the embeddings' sum and two of each layer. After its attention nothing of the last layer is wanted here.
    """

    def rank(world):
        spec, *_, executable, _keep = build(world, "llama", "auto", 2, 16, 4, "f32", kv_heads=6)
        counts = []
        for prefill_from in (0, sys.maxsize):
            executable.prefill_from = prefill_from
            executable.stats(reset=True)
            driven(world, executable, lambda e: SingleSequence(e).feed(np.arange(tokens), outputs="none"))
            counts.append(executable.stats().moved)
        executable.close()
        return spec, counts

    results = run_threads(ranks, rank)
    spec = results[0][0]
    by_token, by_tensor = np.sum([counts for _, counts in results], axis=0)
    layers, a = len(spec.layers), spec.layers[0].mixer
    columns = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    assert by_token == (layers * columns - a.num_heads * a.head_dim) * tokens * (ranks - 1) * 4 // ranks
    if tokens > 2:  # so few rows are prepared by every thread for itself
        assert by_tensor == (2 * layers - 1) * tokens * ranks * (ranks - 1) * spec.hidden_size * 4


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # gemma2: a norm of the sum before it is added
def test_threads_sum_a_wide_row_together_with_the_same_bits(family):
    """Each thread reads its columns of the other ranks' summands, and not all of them. One thread sums alone."""
    ranks, hidden, layers = 7, 3072, 2

    def rank(world):
        found = []
        for threads in (1, 3):
            *_, executable, _keep = build(
                world, family, "auto", threads, 16, 4, "f32", hidden=hidden, ffn=112, kv_heads=7, heads=7
            )
            executable.stats(reset=True)
            rows = driven(world, executable, lambda e: SingleSequence(e).feed(np.arange(1), outputs="all"))
            found.append((rows, executable.stats().moved))
            executable.close()
        return found

    results = run_threads(ranks, rank)
    alone, together = results[0]
    np.testing.assert_array_equal(alone[0], together[0])
    for alone, together in results:
        assert alone[1] == together[1] == (2 * layers + 1) * (ranks - 1) * hidden * 4


def generated(world, folder, prefill: str, transport: str = "auto", experts: str = "tensor"):
    config = EngineConfig(
        model=str(folder),
        cache_type_k="f32",
        cache_type_v="f32",
        threads=1,
        ubatch_size=32,
        ctx_size=96,
        prefill=prefill,
        transport=transport,
        experts=experts,
    )
    model = load_model(config, world)
    engine = lambda executable: Engine(
        executable, Sampler(model.spec.vocab_size), more_stats=lambda: prefill_stats(model.prefill, executable)
    )
    result = driven(world, model.executable, lambda executable: texts(engine(executable)))
    model.executable.close()
    return result


@functools.cache
def text_of_one_rank(folder):
    return generated(SingleWorld(), folder, "auto")[0]


# Half of the families write texts on two hosts, the others on one; `under_mpirun/test_golden.py` has logits of all.
@pytest.mark.parametrize("folder", distinct_families()[::2], ids=lambda folder: folder.name)
def test_one_text_over_hosts(folder):
    """Norms over several heads of a token are not summed over hosts in token-parallel prefill: OLMo, MiniMax and
    models with Mamba-2 are tensor-parallel.
    """
    expected = text_of_one_rank(folder)
    hosts, one, other = ["one", "one", "two", "two"], "token", "tensor"
    latent = ("bailing_hybrid", "deepseek", "glm4_moe_lite", "glm5_next", "glm_moe_dsa", "hy_v4", "kimi_")
    latent += ("dots3_note", "minimax_m3", "mistral4", "qwen4_exp")
    mamba = ("bamba", "falcon_mamba", "granite4h", "jamba", "nemotron_h")
    if folder.name.startswith(("olmo", "minimax_m2", *latent, *mamba)):
        why = "norms (all|groups of) heads|has keys that all heads share, and each host caches all its tokens"
        why += "|from all channels"
        with pytest.raises(ConfigError, match=why):
            thread_ranks.run_threads(hosts, lambda world: generated(world, folder, "token", "tcp"))
        one, other = other, one
    prefill = "token" if one == "token" else "auto"
    found, stats = thread_ranks.run_threads(hosts, lambda world: generated(world, folder, prefill, "tcp"))[0]
    assert found == expected
    assert stats[f"prefill_by_{one}_tokens_total"] > 0 == stats[f"prefill_by_{other}_tokens_total"]


@pytest.mark.parametrize(
    "hosts, folder",
    [((["one", "one", "two", "two"], ["one", "two", "three"])[i % 2], folder) for i, folder in enumerate(MIXTURES)],
    ids=lambda value: getattr(value, "name", "-".join(value) if isinstance(value, list) else ""),
)
def test_one_text_with_whole_experts_on_hosts(hosts, folder):
    """Two ranks share the experts of their host by slices; single ones have some experts each."""
    expected = text_of_one_rank(folder)
    run = lambda world: generated(world, folder, "auto", "tcp", "expert")
    assert thread_ranks.run_threads(hosts, run)[0][0] == expected


@pytest.mark.parametrize(
    "ranks, prefill, folder",
    [((3, "tensor"), (4, "token"))[i % 2] + (folder,) for i, folder in enumerate(distinct_families()[1::2])],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_one_text_whatever_is_cut(ranks, prefill, folder):
    """`under_mpirun/test_golden.py` compares the logits of both prefills for each family."""
    prefill = prefill_of(folder, prefill)
    found, stats = run_threads(ranks, lambda world: generated(world, folder, prefill))[0]
    assert found == text_of_one_rank(folder)
    assert (
        (stats["prefill_by_token_tokens_total"] > 0)
        == (prefill == "token")
        != (stats["prefill_by_tensor_tokens_total"] > 0)
    )


def logits_of(world, path, prefill: str) -> list[np.ndarray]:
    """As the model is, and with tensor-parallel prefill: logits of a prompt in two chunks, of a token after it, and of
    a prompt shorter than four ranks. The last one goes on from the first blocks, or from nothing if a state per
    sequence cannot go back.
    """
    config = EngineConfig(
        model=str(path), cache_type_k="f32", cache_type_v="f32", threads=1, ubatch_size=32, ctx_size=64, prefill=prefill
    )
    model = load_model(config, world)

    def logits(executable):
        sequence = SingleSequence(executable)
        found = [sequence.feed(np.arange(5, 45)), sequence.feed([7])]
        sequence.length = 0 if executable.state_slots else 32
        return np.concatenate([*found, sequence.feed([9, 8, 7])])  # (44, vocab)

    def both(executable):
        first, executable.prefill_from = logits(executable), sys.maxsize
        return first, logits(executable)

    result = driven(world, model.executable, both)
    model.executable.close()
    return result


# Of the largest logit. float32 differs by the order of its sums, and where activations are rounded (to bfloat16, or
# int8 beside quantised weights) what differs by so little may round otherwise.
TOLERANCES = {
    **dict.fromkeys([GOLDEN / "gemma2", GOLDEN / "jamba", GOLDEN / "olmo2"], 1e-5),
    GOLDEN / "gguf/BF16.gguf": 6e-3,
    GOLDEN / "gguf/Q8_0.gguf": 2e-2,
    GOLDEN / "gguf/Q4_K_M.gguf": 3e-2,
}


@pytest.mark.parametrize(
    "ranks, path, tolerance",
    # three ranks have copies of OLMo 2's kv-heads, and the norm over all heads counts each once
    [(3 - index % 2, *item) for index, item in enumerate(TOLERANCES.items())],
    ids=lambda value: getattr(value, "stem", str(value)),
)
def test_logits_are_those_of_one_rank(ranks, path, tolerance):
    expected, _ = logits_of(SingleWorld(), path, "auto")
    by_token, by_tensor = run_threads(ranks, lambda world: logits_of(world, path, prefill_of(path, "token")))[0]
    np.testing.assert_array_equal(by_token, by_tensor)
    assert np.abs(by_token - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("hosts, transport", [((2,), "auto"), ((2, 2), "tcp")])
def test_what_is_measured_is_told(hosts, transport):
    def rank(world):
        model = load_model(
            EngineConfig(
                model=str(GOLDEN / "gemma2"),
                threads=1,
                ctx_size=96,
                transport=transport,
                pipeline_parallel_size=1,  # else the layout over hosts may be stages, where nothing is measured
            ),
            world,
            measure=True,
        )
        model.executable.close()
        return model.prefill, model.executable.prefill_from

    results = thread_ranks.run_threads([f"host {h}" for h, count in enumerate(hosts) for _ in range(count)], rank)
    assert all(result == results[0] for result in results)
    choice, prefill_from = results[0]
    assert prefill_from == choice.from_tokens and min(ratio for _, ratio in choice.ratios) > 0
    assert "at 96" in choice.reason and choice.ratios[0][0] == 96


def test_ranks_apart_cut_tensors_or_are_refused(caplog):
    caplog.set_level("DEBUG")
    hosts = ["one", "two"]
    assert (
        thread_ranks.run_threads(hosts, lambda world: layouts_for(EngineConfig(), world)[:2]) == [(TENSOR, TENSOR)] * 2
    )
    assert (
        "prefill is tensor-parallel: token-parallel needs ranks that share memory, and these are on 2 hosts"
        in caplog.text
    )
    with pytest.raises(
        ConfigError,
        match="--prefill token needs ranks that share memory, and these are on 2 hosts: use --prefill auto or tensor",
    ):
        thread_ranks.run_threads(hosts, lambda world: layouts_for(EngineConfig(prefill="token"), world))
    assert thread_ranks.run_threads(2, lambda world: layouts_for(EngineConfig(), world)[:2]) == [(TOKEN, TENSOR)] * 2
    with pytest.raises(ConfigError, match="--transport tcp is used instead"):
        thread_ranks.run_threads(2, lambda world: layouts_for(EngineConfig(prefill="token", transport="tcp"), world))


def test_hosts_whose_ranks_cannot_share_tokens():
    def layouts(hosts, **more):
        return thread_ranks.run_threads(hosts, lambda world: layouts_for(EngineConfig(**more), world)[:2])[0]

    assert layouts(["one", "one", "two", "two"]) == (TOKEN_IN_HOSTS, TENSOR)
    for hosts, why in (
        (["one", "one", "two"], "these are on 2 hosts with 2, 1 ranks each; start equal numbers on all hosts"),
        (
            ["one", "two", "one", "two"],
            "the ranks of a host do not follow one another; let the launcher fill one host after the other",
        ),
    ):
        assert layouts(hosts) == (TENSOR, TENSOR)
        with pytest.raises(ConfigError, match=re.escape(f"--prefill token needs ranks that share memory, and {why}")):
            layouts(hosts, prefill="token")
