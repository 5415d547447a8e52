"""Positions of three axes (M-RoPE): the native steps against transformers, and against NumPy in float64."""

import numpy as np
import pytest

from ckdist.engine.engine import Engine
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import NativeError, RequestError
from ckdist.models.rope import section_axes
from ckdist.program.step_batch import Batch
from tests.support.interpreter import Interpreter
from tests.support.paths import GOLDEN
from tests.support.programs.replay import build
from tests.support.situations import driven
from tests.support.specs import rope, spec
from tests.support.thread_ranks import run_threads

MODELS = {"qwen2_5_vl": {"qkv_bias": True}, "qwen3_vl": {"qk_norm": "head"}}
SIZES = {"heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 60}
TOKENS, DECODED, PAIRS = 18, 3, 8


def golden(name):
    with np.load(GOLDEN / "axes" / f"{name}.npz") as file:
        return {key: value.astype(np.float32) if value.dtype == np.float16 else value for key, value in file.items()}


def model(name, axes=True):
    """The spec, and the golden arrays."""
    arrays = golden(name)
    own = section_axes(arrays["sections"].tolist(), PAIRS, name == "qwen3_vl") if axes else ()
    return spec(**SIZES, mixer=MODELS[name], ropes={"global": rope(16, axes=own)}), arrays


def feed(executable, arrays, pieces, positions=True, ids=None):
    """The logits of all tokens of one sequence, which is run in pieces of these lengths."""
    found, begin = [], 0
    for tokens in pieces:
        end = begin + tokens
        given = -1 - np.arange(tokens, dtype=np.int32) if ids is None else ids[begin:end]
        batch = Batch(
            given,
            np.array([[tokens, begin, 2]], np.int32),
            np.array([3, 1], np.int32),
            np.arange(tokens, dtype=np.int32),
            embeddings=arrays["rows"][begin:end] if ids is None else None,
            positions=arrays["positions"][begin:end] if positions else None,
        )
        found.append(executable.run(batch).copy())
        begin = end
    return np.concatenate(found)


def on_ranks(ranks, s, weights, body, threads=2):
    """What `body(executable)` returns on rank 0."""

    def rank(world):
        *_, executable, _keep = build(world, s, "auto", threads, 32, 8, "f32", weights=weights)
        result = driven(world, executable, body)
        executable.close()
        return result

    return run_threads(ranks, rank)[0]


def rotated(name, x, positions, sections):
    """Heads (tokens, heads, 16) rotated. Wang et al. 2024, arXiv:2409.12191, section 2.1."""
    time, height, width = (positions[:, axis, None].astype(float) for axis in range(3))
    pairs = np.arange(PAIRS)
    if name == "qwen3_vl":
        is_height, is_width = pairs % 3 == 1, pairs % 3 == 2
        is_height, is_width = is_height & (pairs // 3 < sections[1]), is_width & (pairs // 3 < sections[2])
    else:
        first, second = sections[0], sections[0] + sections[1]
        is_height, is_width = (pairs >= first) & (pairs < second), pairs >= second
    place = np.where(is_height, height, np.where(is_width, width, time))  # (tokens, pairs)
    z = (x[..., :PAIRS] + 1j * x[..., PAIRS:]) * np.exp(1j * place * 1e4 ** -(pairs / PAIRS))[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def numpy_logits(name, arrays):
    """The decoder in float64, with all tokens at once."""
    w = {key: value.astype(np.float64) for key, value in arrays.items()}
    norm = lambda x, weight: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
    x, tokens = w["rows"], len(w["rows"])
    for layer in range(2):
        own = {key.removeprefix(f"model.layers.{layer}."): value for key, value in w.items()}
        h, heads = norm(x, own["input_layernorm.weight"]), {}
        for part in "qkv":
            y = h @ own[f"self_attn.{part}_proj.weight"].T + own.get(f"self_attn.{part}_proj.bias", 0)
            heads[part] = y.reshape(tokens, -1, 16)
        for part in "qk":
            if name == "qwen3_vl":
                heads[part] = norm(heads[part], own[f"self_attn.{part}_norm.weight"])
            heads[part] = rotated(name, heads[part], arrays["positions"], arrays["sections"])
        k, v = (np.repeat(heads[part], 2, axis=1) for part in "kv")
        scores = np.einsum("ihd,jhd->hij", heads["q"], k) / 4 + np.triu(np.full((tokens, tokens), -np.inf), 1)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        o = np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v).reshape(tokens, -1)
        x = x + o @ own["self_attn.o_proj.weight"].T
        h = norm(x, own["post_attention_layernorm.weight"])
        gate, up = (h @ own[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_image_within_text_gives_the_logits_of_transformers(name, ranks):
    """Prefill at once, in chunks and token by token has the same bits, with sharded tensors and with sharded tokens."""
    s, arrays = model(name)

    def body(executable):
        found = []
        for executable.prefill_from in (0, 1000):
            parts = ([TOKENS], [4, 3, 8, *[1] * DECODED], [1] * TOKENS)
            found += [feed(executable, arrays, pieces) for pieces in parts]
        return found

    first, *others = on_ranks(ranks, s, arrays, body)
    np.testing.assert_allclose(first, arrays["logits"], atol=2e-5)
    np.testing.assert_allclose(first, numpy_logits(name, arrays), atol=2e-5)
    for logits in others:
        np.testing.assert_array_equal(logits, first)


@pytest.mark.parametrize("name", MODELS)
def test_a_text_has_the_bits_of_positions_with_one_axis(name):
    s, arrays = model(name)
    plain, _ = model(name, axes=False)
    ids = np.arange(TOKENS, dtype=np.int32)
    arrays["positions"] = np.repeat(ids[:, None], 3, axis=1)
    one = on_ranks(1, plain, arrays, lambda executable: feed(executable, arrays, [14, 4], positions=False, ids=ids))
    for positions in (False, True):
        body = lambda executable, given=positions: feed(executable, arrays, [14, 4], given, ids)
        np.testing.assert_array_equal(on_ranks(1, s, arrays, body), one)


def test_the_reference_of_the_op_rotates_by_three_axes():
    s, arrays = model("qwen3_vl")
    ids = np.arange(TOKENS, dtype=np.int32)

    def rank(world):
        s_, mesh, program, weights, executable, _keep = build(world, s, "auto", 1, 32, 8, "f32", weights=arrays)
        found = driven(world, executable, lambda e: feed(e, arrays, [TOKENS], ids=ids))
        executable.close()
        return found, Interpreter(program, s_, mesh, weights.get).run(ids, axes=arrays["positions"])

    found, expected = run_threads(1, rank)[0]
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_the_engine_goes_on_after_the_largest_position():
    """Beside a text, with a cache that is too small for both, so that one is preempted and computed again."""
    s, arrays = model("qwen2_5_vl")
    prompt, params = np.arange(15), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    positions = arrays["positions"][:15]

    def body(executable):
        alone, both = [], {}
        for begin in range(40):  # each token by itself, at positions given to the executable
            ids = np.array([*prompt, *alone], np.int32)
            later = np.repeat(np.arange(12, 12 + begin, dtype=np.int32)[:, None], 3, axis=1)
            places = {**arrays, "positions": np.concatenate([positions, later])}
            blocks = np.arange(4, dtype=np.int32)
            runs, rows = np.array([[len(ids), 0, 4]], np.int32), np.array([len(ids) - 1], np.int32)
            if len(ids) > 32:
                first = Batch(ids[:32], runs * 0 + [[32, 0, 4]], blocks, rows[:0], positions=places["positions"][:32])
                executable.run(first)
                runs, rows = np.array([[len(ids) - 32, 32, 4]], np.int32), rows - 32
                ids, places["positions"] = ids[32:], places["positions"][32:]
            logits = executable.run(Batch(ids, runs, blocks, rows, positions=places["positions"]))
            alone.append(int(logits[0].argmax()))
        engine = Engine(executable, Sampler(executable.vocab_size))
        for wrong in (positions[:3], positions - 1, positions * 10**4, positions.astype(float)):
            with pytest.raises(RequestError, match="position"):
                engine.add("wrong", prompt, params, positions=wrong)
        engine.add("image", prompt, params, positions=positions)
        engine.add("text", np.arange(20), SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True))
        engine.add("again", prompt, params, positions=positions)
        while engine.has_work:
            for output in engine.step():
                both.setdefault(output.id, []).extend(output.tokens)
        return alone, both, engine.stats()["preemptions_total"]

    alone, both, preemptions = on_ranks(1, s, arrays, body)
    assert both["image"] == both["again"] == alone and len(both["text"]) == 90 and preemptions > 0


def test_a_model_with_one_axis_refuses_positions_of_three():
    s, arrays = model("qwen2_5_vl", axes=False)

    def body(executable):
        with pytest.raises(NativeError, match="positions of the model have one"):
            feed(executable, arrays, [4])
        with pytest.raises(RequestError, match="leave them out"):
            Engine(executable, Sampler(60)).add(0, [1], SamplingParams(), positions=np.zeros((1, 3), np.int32))

    on_ranks(1, s, arrays, body)
