"""Tokens after 32,768 others: logits beside float64 sums, and the memory of the cache beside the stated bytes."""

import pathlib

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from tests.support.checkpoints import write_model

POSITIONS, FIRST, HEAD, HEADS, KV_HEADS, HIDDEN, VOCAB, THETA = 34_000, 512, 64, 2, 2, 128, 64, 5e5
HUGE_PAGE = 2 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "rope_theta": THETA,
    "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip


def resident_bytes() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def reference(arrays, ids, last: int) -> np.ndarray:
    """(last, vocab) logits. Keys before RoPE have only VOCAB values, which saves most of the work."""
    w = {name.removeprefix("model.").removeprefix("layers.0."): a.astype(float) for name, a in arrays.items()}
    norm = lambda x, name: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]
    x = w["embed_tokens.weight"]
    h = norm(x, "input_layernorm")
    q, k, v = ((h @ w[f"self_attn.{n}_proj.weight"].T).reshape(VOCAB, -1, HEAD) for n in "qkv")
    pairs = lambda a: a[..., : HEAD // 2] + 1j * a[..., HEAD // 2 :]
    turns = np.exp(1j * np.outer(np.arange(POSITIONS), THETA ** -(np.arange(0, HEAD, 2) / HEAD)))
    rows = []
    for at in range(POSITIONS - last, POSITIONS):
        heads = []
        for head in range(HEADS):
            query = pairs(q[ids[at], head]) * turns[at]
            kv = head * KV_HEADS // HEADS
            by_id = pairs(k[:, kv]).conj() * query  # (vocab, HEAD / 2)
            scores = (turns[: at + 1].conj() * by_id[ids[: at + 1]]).real.sum(-1) / np.sqrt(HEAD)
            weights = np.exp(scores - scores.max())
            by_value = np.bincount(ids[: at + 1], weights, VOCAB) / weights.sum()
            heads.append(by_value @ v[:, kv])
        rows.append(x[ids[at]] + np.concatenate(heads) @ w["self_attn.o_proj.weight"].T)
    x = np.array(rows)
    h = norm(x, "post_attention_layernorm")
    gate = h @ w["mlp.gate_proj.weight"].T
    x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return norm(x, "norm") @ w["lm_head.weight"].T


def test_logits_after_32768_tokens_and_the_memory_of_the_cache(tmp_path):
    arrays = write_model(tmp_path, CONFIG)
    for name, array in arrays.items():  # scores of a few units
        if array.ndim == 2 and "embed" not in name:
            array /= np.sqrt(array.shape[1])
    write_model(tmp_path, CONFIG, **arrays)
    model = load_model(EngineConfig(model=str(tmp_path), ctx_size=POSITIONS, parallel=1, threads=1), SingleWorld())
    sequence, ids = SingleSequence(model.executable), np.random.default_rng(1).integers(0, VOCAB, POSITIONS)
    sequence.feed(ids[:FIRST], "none")
    before = resident_bytes()
    sequence.feed(ids[FIRST:-3], "none")
    taken = resident_bytes() - before
    found = np.concatenate([sequence.feed(ids[-3:-1]), sequence.feed(ids[-1:])])
    stated = model.executable.kv_bytes * (POSITIONS - FIRST) / POSITIONS
    model.close()
    expected = reference(arrays, ids, 3)
    np.testing.assert_allclose(found, expected, atol=1e-3 * expected.std())
    assert taken == pytest.approx(stated, rel=0.05, abs=HUGE_PAGE)
