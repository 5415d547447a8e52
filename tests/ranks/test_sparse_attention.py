"""Learned sparse attention: an index of keys chooses the positions that tokens see. A program of three layers is traced
with its ops: attention with heads, latent attention, and one that reads the positions of the layer before it.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from ckdist.engine.engine import Engine
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError, LayoutError
from ckdist.layout import SINGLE, TENSOR, Dim
from ckdist.mesh import Mesh
from ckdist.models.blocks.latent_attention import latent_attention
from ckdist.models.decoder import EMBEDDING, OUTPUT, final_norm, head, table
from ckdist.models.indexers import Indexer
from ckdist.models.spec import LatentAttention
from ckdist.program.cache import block_bytes
from ckdist.program.step_batch import Batch
from ckdist.program.tracer import LatentWeights, trace
from ckdist.program.training_tracer import TrainingTracer
from tests.support.interpreter import Interpreter
from tests.support.paths import GOLDEN
from tests.support.programs.replay import build
from tests.support.situations import driven, situations
from tests.support.specs import rope, spec, weights_of
from tests.support.thread_ranks import run_threads

TOP_K, INDEX_HEADS, WIDTH = 37, 5, 16
MODEL = spec(ropes={"local": rope(8)})  # keys of the index are rotated in part


def to_index(g, *operands):
    """Every rank gets the operands of all tokens. The other exchanges of the layer come after `select_positions`."""
    axis, to = g.sharding.tokens.axis, tuple(value.dims[-1] for value in operands)
    names = ["index_q", "index_k", "index_w"]
    return g.emit("all_to_all", operands, names=names, axis=axis, to=to) if axis else operands


def select(g, x, layer, top_k):
    """The positions of a layer, or None."""
    if top_k is None:
        return None
    w = lambda name, *dims: g.weight(f"model.layers.{layer}.indexer.{name}", *dims)
    heads, key, hidden = Dim("index_heads", INDEX_HEADS, WIDTH), Dim("index", 1, WIDTH), x.dims[-1]
    k, weights = g.linears(
        x, (w("wk", key, hidden), w("weights_proj", replace(heads, width=1), hidden)), names=["k", "w"]
    )
    q = g.linear(x, w("wq_b", heads, hidden), names=["q"])
    q, k, weights = to_index(g, q, k, weights)
    k = g.layer_norm(k, w("k_norm.weight", Dim("width", WIDTH)), w("k_norm.bias", Dim("width", WIDTH)), 1e-6)
    return g.select_positions(g.rope(q, "local"), g.rope(k, "local"), weights, layer=layer, index_top_k=top_k)


def attend(g, x, layer, positions):
    w = lambda name, *dims: g.weight(f"model.layers.{layer}.self_attn.{name}", *dims)
    heads, keys = g.sharding.heads(6, 3, 16)
    q, k, v = g.linears(x, (w("q", heads, x.dims[-1]), w("k", keys, x.dims[-1]), w("v", keys, x.dims[-1])))
    q, k, v = g.to_heads((q, k, v), lambda sharding: sharding.heads(6, 3, 16))
    q, k = g.rope(q, "global"), g.rope(k, "global")
    o = g.attend(q, k, v, layer=layer, scale=0.5, soft_cap=0.0, window=0, positions=positions)
    return g.to_tokens(o, heads), heads


def attend_latent(g, x, layer, positions):
    w = lambda name, *dims: g.weight(f"model.layers.{layer}.self_attn.{name}", *dims)
    (heads, _), rank, hidden = g.sharding.heads(9, 1, 24 + 16), Dim("kv_lora", 32), x.dims[-1]
    q, kv = g.linears(x, (w("q", heads, hidden), w("kv", Dim("latent", 1, 32 + 16), hidden)), names=["q", "kv"])
    q, kv = g.to_heads_latent(q, kv)
    own = q.dims[-1]
    k_b = w("k_b", replace(own, width=32), Dim("nope", 24))
    latent = LatentWeights(w("kv_norm", rank), k_b, w("v_b", replace(own, width=24), rank))
    o = g.attend_latent(q, kv, latent, layer=layer, rope="global", scale=0.3, eps=1e-6, positions=positions)
    return g.to_tokens(o, replace(heads, width=24)), replace(heads, width=24)


def forward(g, ids, s, top_k=TOP_K):
    x = g.reduce(g.embed(ids, table(g, s, EMBEDDING)))
    positions = None
    for layer, mixer in enumerate((attend, attend_latent, attend)):
        h = g.rms_norm(x, g.weight(f"model.layers.{layer}.norm", x.dims[-1]), 1e-6)
        positions = select(g, h, layer, top_k) if layer < 2 else positions
        o, heads = mixer(g, h, layer, positions)
        if layer == 2:
            x, o = g.select_rows(x), g.select_rows(o)
        out = g.weight(f"model.layers.{layer}.self_attn.o", x.dims[-1], heads)
        x = g.add(x, g.reduce(g.linear(o, out, names=["attn"])))
    return g.gather(g.linear(final_norm(g, g.gather(x), s), head(g, s), names=["logits"]))


def numbers():
    """Weights that spread the scores, so that rounding moves no position into or out of a list."""
    program = trace(forward, MODEL, SINGLE, Mesh())
    return {name: array * 3 + ("norm" in name) for name, array in weights_of(program).items()}


def on_ranks(ranks, body, top_k=TOP_K, kv_type="f32", threads=2, chunk=64, blocks=16, weights=None):
    """What `body(executable)` returns on rank 0."""
    weights = weights or numbers()

    def rank(world):
        own = functools.partial(forward, top_k=top_k)
        *_, executable, _keep = build(
            world, MODEL, "auto", threads, chunk, blocks, kv_type, weights=weights, forward=own
        )
        result = driven(world, executable, body)
        executable.close()
        return result

    return run_threads(ranks, rank)[0]


def logits_of(executable, pieces=(150, 1, 1, 20)):
    """The logits of one sequence, fed in pieces."""
    sequence, ids = SingleSequence(executable), np.arange(sum(pieces)) * 7 % 100
    ends = np.cumsum(pieces)
    parts = [ids[end - count : end] for count, end in zip(pieces, ends, strict=True)]
    return np.concatenate([sequence.feed(part).copy() for part in parts])


@functools.cache
def expected():
    """In float64, by the references of the ops."""
    program = trace(forward, MODEL, SINGLE, Mesh())
    return Interpreter(program, MODEL, Mesh(), numbers().get, np.float64).run(np.arange(172) * 7 % 100)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tokens_see_the_positions_with_the_largest_scores(ranks):
    """Up to 172 positions, of which a token sees 37, with sharded tensors and with sharded tokens."""

    def body(executable):
        found = []
        for executable.prefill_from in (0, 1000):
            found += [logits_of(executable), logits_of(executable, [1] * 172), logits_of(executable, [13] * 13 + [3])]
        return found

    first, *others = on_ranks(ranks, body)
    assert np.abs(first - expected()).max() < 1e-4 * np.abs(expected()).max()
    for logits in others:
        np.testing.assert_array_equal(logits, first)


def test_an_index_of_integers_chooses_like_float64():
    """Rounding moves a position into or out of the lists of one of 172 tokens; in f16, of seven."""
    errors = np.abs(on_ranks(1, logits_of, kv_type="i16") - expected()).max(-1) / np.abs(expected()).max()
    assert (errors > 0.01).sum() <= 2


@pytest.mark.parametrize("kv_type", ["f32", "f16", "i16", "q8_0", "q4_0", "i16/q8_0", "q8_0/f16", "q8_0/q4_0"])
def test_up_to_top_k_positions_are_dense_attention_to_the_bit(kv_type):
    """172 positions of at most 172; and of 171, of which only the last token leaves one out."""
    dense = on_ranks(2, logits_of, None, kv_type)
    np.testing.assert_array_equal(on_ranks(2, logits_of, 172, kv_type), dense)
    almost = on_ranks(2, logits_of, 171, kv_type)
    np.testing.assert_array_equal(almost[:-1], dense[:-1])
    assert (almost[-1] != dense[-1]).any()


def deepseek(g, ids, s):
    """The sum x + attention(x) of DeepSeek-V3.2, without a norm before it, in place of logits."""
    x = g.reduce(g.embed(ids, table(g, s, EMBEDDING)))
    a = LatentAttention(5, 32, 24, 16, 20, 40**-0.5, 36, norm_eps=1e-6, indexer=Indexer(16, 24, 19, "local"))
    attn = latent_attention(g, x, a, "layer", 0, 1e-6, g.select_rows)
    return g.gather(g.linear(g.gather(g.add(g.select_rows(x), attn)), head(g, s), names=["logits"]))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_layer_of_deepseek_v32_gives_the_output_of_transformers(ranks):
    with np.load(GOLDEN / "index" / "deepseek_v32.npz") as file:
        arrays = {key: value.astype(np.float32) for key, value in file.items()}
    nope, values = np.split(arrays["kv_b_proj.weight"].reshape(5, 44, 32), [24], axis=1)  # (heads, width, rank)
    own = {"k_b_proj.weight": nope.swapaxes(1, 2).reshape(-1, 24), "v_b_proj.weight": values.reshape(-1, 32)}
    identity = np.eye(64, dtype=np.float32)
    weights = {f"layer.{name}": w for name, w in {**arrays, **own}.items()}
    weights |= {EMBEDDING: identity, OUTPUT: identity}
    s = spec(vocab=64, ropes={"global": rope(16, interleaved=True), "local": rope(16)})

    def body(executable):
        found = []
        for executable.prefill_from in (0, 1000):
            for begin, end in ((0, 40), (40, 69), (69, 70)):
                ids, blocks = -1 - np.arange(end - begin, dtype=np.int32), np.arange(5, dtype=np.int32)
                runs, rows = np.array([[len(ids), begin, 5]], np.int32), np.arange(len(ids), dtype=np.int32)
                batch = Batch(ids, runs, blocks, rows, embeddings=arrays["rows"][begin:end])
                found.append(executable.run(batch).copy())
        return np.split(np.concatenate(found), 2)

    def rank(world):
        *_, executable, _keep = build(world, s, "auto", 2, 64, 8, "f32", weights=weights, forward=deepseek)
        result = driven(world, executable, body)
        executable.close()
        return result

    tokens, tensors = run_threads(ranks, rank)[0]
    np.testing.assert_array_equal(tokens, tensors)
    np.testing.assert_allclose(tokens - arrays["rows"], arrays["out"], atol=2e-5)


def test_threads_and_neighbours_change_no_bit():
    """One token of a long context is divided over threads by spans. Beside it other sequences run and share blocks."""
    one, three = (on_ranks(1, situations, 7, threads=threads) for threads in (1, 3))
    for a, b in zip(one, three, strict=True):
        np.testing.assert_array_equal(a, b)
    long = [on_ranks(1, lambda e: logits_of(e, (1400, 1, 1)), 1100, "i16", n, 128, 96)[-3:] for n in (1, 3)]
    np.testing.assert_array_equal(*long)


def test_reuse_preemption_and_batches_give_the_tokens_of_a_sequence_alone():
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = [(np.arange(n) * 11 + 3) % 100 for n in (70, 50, 90, 70)]

    def body(executable):
        alone = []
        for prompt in prompts:
            sequence, tokens = SingleSequence(executable), []
            logits = sequence.feed(prompt, "last")
            while len(tokens) < 60:
                tokens.append(int(logits[0].argmax()))
                logits = sequence.feed(tokens[-1:], "last")
            alone.append(tokens)
        engine, found = Engine(executable, Sampler(executable.vocab_size)), {}
        for id, prompt in enumerate(prompts):
            engine.add(id, prompt, params)
            for output in engine.step():
                found.setdefault(output.id, []).extend(output.tokens)
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.id, []).extend(output.tokens)
        return alone, [found[id] for id in range(len(prompts))], engine.stats()

    alone, found, stats = on_ranks(2, body, kv_type="f16", blocks=18)
    assert found == alone and stats["preemptions_total"] > 0 and stats["cached_tokens_total"] > 0


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "i16", "q8_0", "q4_0", "i16/q8_0", "q8_0/f16", "q8_0/q4_0"])
def test_equal_scores_list_the_lower_positions(kv_type):
    """Without weights of heads all scores are zero, and each token sees the first positions, for any type of cache.

    Rounding of keys and values moves no position then. It makes errors like those of dense attention.
    """
    weights = {name: w * 0 if "weights_proj" in name else w for name, w in numbers().items()}
    errors = []
    for top_k in (None, TOP_K):
        own = functools.partial(forward, top_k=top_k)
        reference = Interpreter(trace(own, MODEL, SINGLE, Mesh()), MODEL, Mesh(), weights.get, np.float64)
        logits = reference.run(np.arange(172) * 7 % 100)
        found = on_ranks(2, logits_of, top_k, kv_type, weights=weights)
        errors.append(np.abs(found - logits).mean() / np.abs(logits).max())
    most = 0.3 if "q4_0" in kv_type else 0.1
    assert errors[1] < 1e-6 if kv_type == "f32" else errors[1] < 2 * errors[0] < most, errors


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
def test_the_index_is_in_the_bytes_of_blocks_on_every_rank(kv_type):
    """Seven ranks, of which some have no heads."""

    def rank(world):
        *_, executable, _keep = build(world, MODEL, "auto", 1, 16, 8, kv_type, weights=numbers(), forward=forward)
        caches, types = executable.caches.values(), executable.config.types
        counted, allocated = executable.config.num_blocks * block_bytes(caches, types), executable.kv_bytes
        found = driven(world, executable, lambda e: logits_of(e, (60,)))
        executable.close()
        return -(-counted // 64) * 64, allocated, found

    results = run_threads(7, rank)
    assert all(counted == allocated for counted, allocated, _ in results)
    if kv_type == "f32":
        assert np.abs(results[0][2] - expected()[:60]).max() < 1e-4 * np.abs(expected()).max()


def test_what_cannot_be_sparse_is_refused():
    mesh = Mesh()
    with pytest.raises(ConfigError, match="sparse attention can be served, not trained"):
        trace(forward, MODEL, SINGLE, mesh, TrainingTracer)

    def windowed(g, ids, s):
        x = g.reduce(g.embed(ids, table(g, s, EMBEDDING)))
        q, k, v = (g.linear(x, g.weight(name, Dim("heads", 4, 16), x.dims[-1])) for name in "qkv")
        positions = select(g, x, 0, 8)
        return g.attend(q, k, v, layer=0, scale=1.0, soft_cap=0.0, window=4, positions=positions)

    with pytest.raises(LayoutError, match="allow no listed positions"):
        trace(windowed, MODEL, SINGLE, mesh)
    sharded = lambda g, ids, s: select(g, g.reduce(g.embed(ids, table(g, s, EMBEDDING))), 0, 0)
    with pytest.raises(LayoutError, match="select_positions: queries"):
        trace(sharded, MODEL, TENSOR, Mesh({"tp": 2}, 0))
