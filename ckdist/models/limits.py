"""Upper limits of a model's numbers, and checks for each ModelSpec."""

from ckdist.errors import ModelFileError
from ckdist.models.spec import Attention, LatentAttention, ModelSpec, MoeFfn

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20  # hidden size and heads * head_dim
MAX_FFN = 1 << 22
MAX_HEADS = 1 << 14
MAX_EXPERTS = 1 << 12
MAX_HEAD_DIM = 1 << 10
MAX_CONV = 16  # kernel length of a short convolution
MAX_LATENT = 1 << 11  # elements of a latent vector; with its rotated part a key has at most 4096
MAX_VOCAB = 1 << 24
MAX_POSITION = 1 << 30


def checked(spec: ModelSpec, where: str) -> ModelSpec:
    """Returns `spec`. Raises ModelFileError if its numbers do not fit together. Readers have checked single fields."""
    if spec.encoder is not None:
        checked(spec.encoder, where)
        for own, other in zip(spec.layers, spec.encoder.layers, strict=False):
            a, b = own.attention, other.attention
            if (a.num_kv_heads, a.head_dim) != (b.num_kv_heads, b.head_dim):
                raise ModelFileError(
                    f"{where}: the decoder has {a.num_kv_heads} heads of {a.head_dim}, the encoder {b.num_kv_heads} of "
                    f"{b.head_dim}; both must be the same, for they share a cache"
                )
    kinds = (Attention, LatentAttention)
    for a in {id(layer.mixer): layer.mixer for layer in spec.layers}.values():
        if isinstance(a, kinds):
            check_attention(a, where)
        elif a is not None:
            a.check(where)
    mixers = [getattr(layer.mixer, "attention", layer.mixer) for layer in spec.layers]
    if not any(isinstance(one, kinds) or hasattr(one, "window") or hasattr(one, "dt_rank") for one in mixers):
        raise ModelFileError(f"{where}: no layer has attention; without it only models of Mamba-1 are supported")
    for f in {id(layer.ffn): layer.ffn for layer in spec.layers}.values():
        if isinstance(f, MoeFfn):
            _check_experts(f, where)
    return spec


def check_attention(a: Attention | LatentAttention, where: str) -> None:
    """Raises ModelFileError if numbers of attention do not fit together."""
    if isinstance(a, LatentAttention):
        for name, width in (("kv_lora_rank", a.kv_lora_rank), ("qk_rope_head_dim", a.rope_dim)):
            if width % 8:
                raise ModelFileError(f"{where}: {name} is {width}; it must be a multiple of 8 to be cached")
    elif a.num_heads % a.num_kv_heads:
        raise ModelFileError(f"{where}: {a.num_heads} attention heads cannot share {a.num_kv_heads} kv-heads evenly")
    if a.head_dim % 2:
        raise ModelFileError(f"{where}: head_dim is {a.head_dim}; it must be even to be rotated")
    if a.num_heads * a.head_dim > MAX_WIDTH:
        raise ModelFileError(f"{where}: {a.num_heads} heads of {a.head_dim} are wider than the {MAX_WIDTH} allowed")


def _check_experts(f: MoeFfn, where: str) -> None:
    """Raises ModelFileError if a token cannot have `used` experts."""
    r = f.routing
    if r.used > f.num_experts:
        raise ModelFileError(f"{where}: a token takes {r.used} experts, but there are {f.num_experts}")
    if f.num_experts % r.groups or r.top_groups > r.groups:
        raise ModelFileError(
            f"{where}: {f.num_experts} experts cannot be {r.groups} equal groups with {r.top_groups} chosen ones"
        )
    if r.used > f.num_experts // r.groups * r.top_groups:
        raise ModelFileError(
            f"{where}: a token takes {r.used} experts, but {r.top_groups} of {r.groups} groups have "
            f"{f.num_experts // r.groups * r.top_groups}"
        )
