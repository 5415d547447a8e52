"""Kimi-Linear: Kimi Delta Attention, latent attention without rotation in some layers, and DeepSeek-V3's experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits, rope
from ckdist.models.families import deepseek_v2, deepseek_v3, family
from ckdist.models.families.family import GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.spec import LatentAttention, LayerSpec, ModelSpec
from ckdist.models.state_mixers import GatedDeltaNet

GGUF = "kimi-linear"
LINEAR, FULL = "linear_attention", "full_attention"
KEYS = deepseek_v3.KEYS.but(
    defaults={
        "first_k_dense_replace": 1, "linear_conv_kernel_dim": 4, "linear_head_dim": 128, "linear_num_heads": 32,
        "max_position_embeddings": 1048576, "n_group": 1, "q_lora_rank": None, "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446, "topk_group": 1,
    },
    aliases={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "moe_router_activation_func": "scoring_func",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    only={"mla_use_nope": True, "use_grouped_topk": True},
    unused=("rope_interleave", "rope_parameters", "rope_theta"),  # there is no rotation
)  # fmt: skip


def linear_layers(f: Fields, count: int) -> list[bool]:
    """Reads from a config.json whether each layer has linear attention."""
    own, types = f.sub("linear_attn_config"), from_config.layer_kinds(f, count, (LINEAR, FULL))
    full, linear = own.raw("full_attn_layers"), own.raw("kda_layers")  # numbers from 1 on
    if types is None and full is not None:
        if not isinstance(full, list) or not isinstance(linear, list) or {*full, *linear} != {*range(1, count + 1)}:
            raise own.error("full_attn_layers", full, f"with kda_layers the numbers 1 to {count}, each in one of both")
        types = [FULL if i + 1 in full else LINEAR for i in range(count)]
    return [not i or i % 4 != 0 if types is None else types[i] == LINEAR for i in range(count)]


def delta_attention(f: Fields) -> GatedDeltaNet:
    """Reads the linear attention from a config.json."""
    own = f.sub("linear_attn_config")
    of = lambda name, absent, high: own.integer(name, f.integer(absent, high=high), high=high)
    heads, width = of("num_heads", "linear_num_heads", limits.MAX_HEADS), of("head_dim", "linear_head_dim", 1 << 10)
    taps = of("short_conv_kernel_size", "linear_conv_kernel_dim", limits.MAX_CONV)
    return GatedDeltaNet(heads, heads, width, width, taps, by_row=True, gate_rank=width)


def config(f: Fields, outer: Fields) -> ModelSpec:
    rotated = f.integer("qk_rope_head_dim", high=limits.MAX_HEAD_DIM)
    n, none = from_config.sizes(f, head_dim=rotated), rope.unscaled(rotated, 1e4, interleaved=True)  # no layer uses it
    full, linear = replace(deepseek_v2.latent_attention(f, n, none), rope=None), delta_attention(f)
    mixers = [linear if flag else full for flag in linear_layers(f, n.num_layers)]
    layers = [LayerSpec(*parts) for parts in zip(mixers, deepseek_v2.feed_forwards(f, n.num_layers), strict=True)]
    return from_config.model(f, outer, n, layers, {"global": none})


def gguf(header: GgufHeader) -> ModelSpec:
    f, name = header.fields, "attention.head_count_kv"
    counts = f.raw(name)
    if not isinstance(counts, np.ndarray) or len(counts) != f.integer("block_count", high=limits.MAX_LAYERS):
        raise f.error(name, counts, "a number for each layer, 0 for linear attention")
    spec = deepseek_v2.gguf_model(header.but({name: 1}))
    heads, (width, taps) = spec.mixers(LatentAttention)[0].num_heads, gguf_widths(f)
    linear = GatedDeltaNet(heads, heads, width, width, taps, by_row=True, gate_rank=width)
    both = zip(spec.mixers(LatentAttention), counts.tolist(), strict=False)  # further ones predict
    return spec.with_layers(mixer=[replace(full, rope=None) if count else linear for full, count in both])


def gguf_widths(f: Fields) -> tuple[int, int]:
    """Reads the elements of a head of linear attention, and the taps of its convolutions."""
    return f.integer("kda.head_dim", high=limits.MAX_HEAD_DIM), f.integer("ssm.conv_kernel", high=limits.MAX_CONV)


def export(spec: ModelSpec, where: str, architecture: str = GGUF, more: Mapping[str, Any] | None = None) -> GgufForm:
    """Returns the GGUF metadata of a model. Raises ArchitectureError for a model that GGUF cannot describe."""
    full, linear = next(iter(spec.mixers(LatentAttention)), None), next(iter(spec.mixers(GatedDeltaNet)), None)
    if full is None or linear is None or full.num_heads != linear.num_value_heads:
        raise ArchitectureError(f"{where}: one kind of attention alone, or with other heads, has no GGUF form")
    own = {
        "attention.head_count_kv": [int(isinstance(layer.mixer, LatentAttention)) for layer in spec.layers],
        "kda.head_dim": linear.key_dim,
        "ssm.conv_kernel": linear.conv_kernel,
        **(more or {}),
    }
    return deepseek_v2.form(architecture, spec, where, own)


def gguf_values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight for GGUF."""
    if weight.endswith(".A_log"):
        return -np.exp(values).reshape((-1,) if spec.block_residuals else (-1, 1))  # Kimi-K3 has a vector
    mixer = spec.layer_of(weight).mixer if "_conv1d." in weight else None
    return values.reshape(-1, 1, mixer.conv_kernel) if isinstance(mixer, GatedDeltaNet) else values


PARTS = {f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"}
PARTS |= {f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")}
PARTS |= {"ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm"}
PARTS |= {"ssm_a": "self_attn.A_log", "ssm_dt.bias": "self_attn.dt_bias"}
MOE = {f"block_sparse_moe.{name}": f"mlp.{name}" for name in ("gate", "gate.e_score_correction")}
MOE |= family.numbered("block_sparse_moe.experts", "mlp.experts")
MOE |= family.renamed("block_sparse_moe.shared_experts.{}_proj", "mlp.shared_expert.{}_proj")
FAMILY = replace(
    deepseek_v3.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    gguf_values=gguf_values,
    safetensors=deepseek_v2.SAFETENSORS.but_in_layers(MOE),
    gguf_names=deepseek_v2.GGUF_NAMES.but_in_layers(PARTS, (r".*\.A_log", "minus_exp")),
)
