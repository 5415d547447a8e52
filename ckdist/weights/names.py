"""The one place that maps the tensor names of files to the names of Hugging Face, which the rest of the code uses."""

import re

_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_BLOCK_POST_NORMS = _GGUF_BLOCK | {  # Gemma: a norm after each part as well as before it
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)")

# Files in which q_proj and k_proj are stored for the rotation of neighbours instead of halves: the two halves of each
# head's rows are interleaved.
_INTERLEAVED_ARCHITECTURES = ("llama",)

# Families whose norms multiply by 1 + weight: safetensors files hold the weight, GGUF files the sum.
_NORM_LESS_ONE_ARCHITECTURES = ("gemma2", "gemma3")


def from_gguf(name: str, post_norms: bool) -> str | None:
    """The Hugging Face name of a GGUF tensor; None where the forward does not read it."""
    match = _BLOCK.fullmatch(name)
    if match:
        part = (_GGUF_BLOCK_POST_NORMS if post_norms else _GGUF_BLOCK).get(match[2])
        return part and f"model.layers.{int(match[1])}.{part}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_GGUF_TOP[stem]}.{kind}" if stem in _GGUF_TOP and kind == "weight" else None


def gguf_rows_interleaved(architecture: str, name: str) -> bool:
    """Whether a GGUF of `architecture` stores the rows of `name` (a Hugging Face name) interleaved within each head."""
    return architecture in _INTERLEAVED_ARCHITECTURES and (".q_proj." in name or ".k_proj." in name)


def from_safetensors(name: str) -> str:
    """The name of a text model's tensor, for a name in a file that may hold a multimodal model."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name


def safetensors_norm_less_one(architecture: str, name: str) -> bool:
    """Whether safetensors of `architecture` store one less than what the norm `name` multiplies by."""
    return architecture in _NORM_LESS_ONE_ARCHITECTURES and name.endswith("norm.weight")


def to_gguf(name: str, post_norms: bool) -> str:
    """The GGUF name of a Hugging Face weight: the way back of `from_gguf`."""
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if match:
        block = _GGUF_BLOCK_POST_NORMS if post_norms else _GGUF_BLOCK
        return f"blk.{match[1]}.{next(gguf for gguf, part in block.items() if part == match[2])}.{kind}"
    return f"{next(gguf for gguf, part in _GGUF_TOP.items() if part == stem)}.{kind}"
