"""The known model families by the names that files give them, and the checks that every ModelSpec passes."""

from collections.abc import Iterable

from ckdist.errors import ArchitectureError, ModelFileError
from ckdist.models.spec import ModelSpec

BY_CONFIG = {  # `architectures` in config.json -> family
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
BY_MODEL_TYPE = {  # `model_type` in config.json, where `architectures` is absent
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}
BY_GGUF = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")  # `general.architecture`; Mistral's files say llama

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20  # hidden size and heads * head_dim
MAX_FFN = 1 << 22
MAX_HEADS = 1 << 14
MAX_HEAD_DIM = 1 << 10
MAX_VOCAB = 1 << 24
MAX_POSITION = 1 << 30


def unknown(where: str, name: str, known: Iterable[str]) -> ArchitectureError:
    """The error for a family that is not known."""
    return ArchitectureError(
        f"{where}: architecture {name[:100]!r} is not known; the known ones are {', '.join(known)}"
    )


def checked(spec: ModelSpec, where: str) -> ModelSpec:
    """`spec`, when its numbers fit together; else ModelFileError. Single fields were checked when they were read."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelFileError(
            f"{where}: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} kv-heads evenly"
        )
    if spec.head_dim % 2:
        raise ModelFileError(f"{where}: head_dim is {spec.head_dim}; it must be even to be rotated")
    if spec.num_heads * spec.head_dim > MAX_WIDTH:
        raise ModelFileError(
            f"{where}: {spec.num_heads} heads of {spec.head_dim} are wider than the {MAX_WIDTH} allowed"
        )
    return spec
