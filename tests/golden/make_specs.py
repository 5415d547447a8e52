"""Writes specs.json: configurations in the old and the new way of writing them, and what transformers makes of them.

Run with an environment that has torch and transformers: python tests/golden/make_specs.py
"""

import json
import pathlib

from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

BASE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
CASES = {
    "llama": ("Llama", {}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-llama3": ("Llama", {"rope_theta": 500000.0, "head_dim": 128, "rope_scaling": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 1024}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"rope_theta": 1e6}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 3}),
    "qwen2-yarn": ("Qwen2", {"rope_theta": 1e6, "rope_scaling": YARN}),
    "qwen3-yarn-mscale": ("Qwen3", {"head_dim": 128, "rope_theta": 1e6, "rope_scaling": YARN | {
        "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False}}),
    "qwen3-yarn-attention-factor": ("Qwen3", {"head_dim": 64, "rope_scaling": YARN | {"attention_factor": 1.25}}),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 144, "sliding_window": 128}),
    "gemma2-no-caps": ("Gemma2", {"head_dim": 32, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", {"head_dim": 32, "sliding_window": 512}),
    "gemma3-linear": ("Gemma3", {"head_dim": 32, "sliding_window": 512, "sliding_window_pattern": 3, "rope_theta": 2e6,
                                 "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
}  # fmt: skip
MODULES = {"Llama": llama, "Mistral": mistral, "Qwen2": qwen2, "Qwen3": qwen3, "Gemma2": gemma2, "Gemma3": gemma3}


def case(family: str, fields: dict) -> dict:
    old = BASE | json.loads(json.dumps(fields)) | {"architectures": [f"{family}ForCausalLM"]}
    module = MODULES[family]
    config = getattr(module, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")(**json.loads(json.dumps(old)))
    rotary = getattr(module, f"{family}RotaryEmbedding")(config)
    model = getattr(module, f"{family}ForCausalLM")(config)
    attention = [layer.self_attn for layer in model.model.layers]
    is_nested = family == "Gemma3"
    return {
        "old": old,
        "new": json.loads(config.to_json_string(use_diff=False)),
        "inverse_frequencies": (rotary.full_attention_inv_freq if is_nested else rotary.inv_freq).tolist(),
        "local": rotary.sliding_attention_inv_freq.tolist() if is_nested else None,
        "magnitude": rotary.full_attention_attention_scaling if is_nested else rotary.attention_scaling,
        "attention_scale": attention[0].scaling,
        "sliding": [getattr(a, "sliding_window", None) or getattr(config, "sliding_window", None) * (family == "Mistral") or 0
                    if family != "Llama" and config.sliding_window else 0 for a in attention],
        "caps": [getattr(config, f"{n}_logit_softcapping", None) or 0 for n in ("attn", "final")],
        "tied": config.tie_word_embeddings,
        "shapes": {n: list(p.shape) for n, p in model.named_parameters()},
    }  # fmt: skip


if __name__ == "__main__":
    golden = {name: case(*arguments) for name, arguments in CASES.items()}
    target = pathlib.Path(__file__).with_name("specs.json")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in golden.items())
    target.write_text("{\n" + lines + "\n}\n")
