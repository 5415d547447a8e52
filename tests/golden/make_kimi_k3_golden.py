"""Makes tests/golden/kimi_k3: a tiny random model in the published spelling, and llama.cpp's logits and greedy text.

    python tests/golden/make_kimi_k3_golden.py LLAMA_CPP_FOLDER

It needs torch, llama-cpp-python 0.3.36 and the source of its llama.cpp, whose converter makes the GGUF file.
Transformers has no such model. Logits are those of float32 weights and caches, without flash attention.
"""

import ctypes
import json
import runpy
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as native
from safetensors.numpy import save_file

OUT = Path(__file__).with_name("kimi_k3")
HIDDEN, HEADS, WIDTH, EXPERTS, LATENT, VOCAB, TOKENS, LAYERS = 24, 3, 8, 4, 16, 262, 48, 4
NOPE, ROTATED, VALUE, KV_RANK, Q_RANK, SIZE = 8, 8, 8, 16, 12, 8
FULL = (2, 4)  # layers with latent attention, from 1 on
CONFIG = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 36, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "rms_norm_eps": 1e-6, "hidden_act": "situ", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "attn_res_block_size": 2, "mla_use_nope": True,
        "mla_use_output_gate": True, "kv_lora_rank": KV_RANK, "q_lora_rank": Q_RANK, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROTATED, "v_head_dim": VALUE, "num_experts": EXPERTS, "num_experts_per_token": 2,
        "num_shared_experts": 2, "moe_intermediate_size": SIZE, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "routed_expert_hidden_size": LATENT, "latent_moe_use_norm": True, "routed_scaling_factor": 1.5,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
        "use_grouped_topk": True, "model_max_length": 512, "tie_word_embeddings": False, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
        "linear_attn_config": {
            "full_attn_layers": list(FULL), "kda_layers": [1, 3], "head_dim": WIDTH, "num_heads": HEADS,
            "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True,
        },
    },
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """Published name -> shape, without the prefix of the text part."""
    gated = lambda path, size, width=HIDDEN: {
        f"{path}.{name}_proj": (width, size) if name == "down" else (size, width) for name in ("gate", "up", "down")
    }
    found = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    found |= {"model.output_attn_res_norm": (HIDDEN,), "model.output_attn_res_proj": (1, HIDDEN)}
    for i in range(LAYERS):
        at, inner = f"model.layers.{i}", HEADS * WIDTH
        own = {f"{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
        own |= {f"{part}_res_norm": (HIDDEN,) for part in ("self_attention", "mlp")}
        own |= {f"{part}_res_proj": (1, HIDDEN) for part in ("self_attention", "mlp")}
        if i + 1 in FULL:
            mixer = {
                "q_a_proj": (Q_RANK, HIDDEN), "q_a_layernorm": (Q_RANK,),
                "q_b_proj": (HEADS * (NOPE + ROTATED), Q_RANK),
                "kv_a_proj_with_mqa": (KV_RANK + ROTATED, HIDDEN), "kv_a_layernorm": (KV_RANK,),
                "kv_b_proj": (HEADS * (NOPE + VALUE), KV_RANK), "g_proj": (HEADS * VALUE, HIDDEN),
                "o_proj": (HIDDEN, HEADS * VALUE),
            }  # fmt: skip
        else:
            mixer = {f"{name}_proj": (inner, HIDDEN) for name in "qkvg"} | {f"{n}_conv1d": (inner, 1, 4) for n in "qkv"}
            mixer |= {"f_a_proj": (WIDTH, HIDDEN), "f_b_proj": (inner, WIDTH), "b_proj": (HEADS, HIDDEN)}
            mixer |= {"A_log": (8,), "dt_bias": (inner,), "o_norm": (WIDTH,), "o_proj": (HIDDEN, inner)}
        own |= {f"self_attn.{name}": shape for name, shape in mixer.items()}
        if i:
            moe = "block_sparse_moe"
            own |= {f"{moe}.gate": (EXPERTS, HIDDEN), f"{moe}.gate.e_score_correction_bias": (EXPERTS,)}
            own |= {f"{moe}.routed_expert_down_proj": (LATENT, HIDDEN), f"{moe}.routed_expert_norm": (LATENT,)}
            own |= {f"{moe}.routed_expert_up_proj": (HIDDEN, LATENT), **gated(f"{moe}.shared_experts", 2 * SIZE)}
            for e in range(EXPERTS):
                own |= {f"{moe}.experts.{e}.{name}": (SIZE, LATENT) for name in ("w1", "w3")}
                own[f"{moe}.experts.{e}.w2"] = (LATENT, SIZE)
        else:
            own |= gated("mlp", 36)
        found |= {f"{at}.{name}": shape for name, shape in own.items()}
    return found


def tensors(seed: int) -> dict[str, np.ndarray]:
    """Weights under which every part matters. A_log has more elements than heads, as in the published files."""
    rng, found = np.random.default_rng(seed), {}
    for name, shape in shapes().items():
        noise = rng.standard_normal(shape)
        alone = name.endswith(("A_log", "_bias"))
        if name.endswith("A_log"):
            noise = np.concatenate([np.linspace(-2.0, 1.0, HEADS), np.zeros(8 - HEADS)])
        elif "norm" in name:
            noise = 1 + 0.25 * noise
        elif "_bias" in name:
            noise *= 0.2 if "correction" in name else 0.7
        elif "embed_tokens" not in name and "conv1d" not in name:
            noise *= (2.0 if "_res_proj" in name else 1.4) / np.sqrt(shape[-1])
        found[f"language_model.{name}{'' if alone else '.weight'}"] = noise.astype(np.float32)
    return found


def vocabulary(model: object) -> None:
    """Bytes and some further tokens, in place of the converter's own vocabulary."""
    writer = model.gguf_writer
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += [f"▁{i}" for i in range(VOCAB - len(words))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (VOCAB - 259))


def convert(llama_cpp_folder: Path, path: str) -> None:
    """Writes the GGUF file with llama.cpp's converter."""
    sys.path[:0] = [str(llama_cpp_folder), str(llama_cpp_folder / "gguf-py")]
    from conversion import kimi_k3

    kimi_k3.KimiK3Model.set_vocab = vocabulary
    sys.argv = ["convert", str(OUT), "--outtype", "f32", "--outfile", path]
    runpy.run_path(str(llama_cpp_folder / "convert_hf_to_gguf.py"), run_name="__main__")


class Peer:
    """llama.cpp's model on one thread."""

    def __init__(self, path: str):
        native.llama_backend_init()
        self.model = native.llama_model_load_from_file(path.encode(), native.llama_model_default_params())

    def logits(self, ids: list[int]) -> np.ndarray:
        """(tokens, vocab) after all tokens in one batch."""
        params = native.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = 0  # float32
        params.flash_attn_type = 0
        context = native.llama_init_from_model(self.model, params)
        batch = native.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        assert native.llama_decode(context, batch) == 0
        row = lambda i: np.ctypeslib.as_array(
            ctypes.cast(native.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float)), (VOCAB,)
        )
        found = np.array([row(i) for i in range(len(ids))])
        native.llama_free(context)
        return found


def main() -> None:
    OUT.mkdir(exist_ok=True)
    (OUT / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    seed = int((sys.argv + ["0"])[2])
    save_file(tensors(seed), OUT / "model.safetensors", metadata={"format": "pt"})
    ids = np.random.default_rng(seed).integers(3, VOCAB, TOKENS).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        convert(Path(sys.argv[1]), path := f"{folder}/m.gguf")
        peer, text, margin = Peer(path), ids[:8].tolist(), 1.0
        logits = peer.logits(ids.tolist())
        for _ in range(200):
            last = peer.logits(text)[-1]
            best = np.sort(last)[-2:]
            margin = min(margin, float((best[1] - best[0]) / np.abs(last).max()))
            text.append(int(last.argmax()))
    np.save(OUT / "ids.npy", ids)
    np.save(OUT / "logits.npy", logits)
    np.save(OUT / "greedy.npy", np.array(text[8:], np.int32))
    golden = {
        "llama_cpp_python": llama_cpp.__version__, "seed": seed, "greedy_prompt_tokens": 8,
        "distinct_greedy_tokens": len(set(text[8:])), "smallest_margin": float(f"{margin:.3g}"),
        "largest_logit": float(f"{np.abs(logits).max():.4g}"),
    }  # fmt: skip
    (OUT / "golden.json").write_text(json.dumps(golden, indent=2) + "\n")
    print(golden)


if __name__ == "__main__":
    main()
