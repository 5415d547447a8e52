"""Ling 3: Kimi Delta Attention with bounded decays, gated latent attention, DeepSeek-V3's experts."""

from dataclasses import replace

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import deepseek_v2, deepseek_v3, kimi_linear
from ckdist.models.families.family import Fields, GgufForm, GgufHeader
from ckdist.models.spec import LatentAttention, ModelSpec
from ckdist.models.state_mixers import GatedDeltaNet

GGUF = "bailingmoe3"
KEYS = deepseek_v3.KEYS.but(
    defaults={
        **sizes(hidden=2560, ffn=6144, layers=42, heads=32, head=128, positions=262144, vocab=157184),
        "first_k_dense_replace": 2, "kda_lower_bound": -5.0, "kda_safe_gate": True, "layer_group_size": 6,
        "moe_intermediate_size": 768, "n_routed_experts": 512, "q_lora_rank": None, "rope_theta": 6e6,
        "short_conv_kernel_size": 4,
    },
    aliases={
        "linear_conv_kernel_dim": "short_conv_kernel_size",
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    only={
        "gated_attention_proj_granularity_type": "head_wise", "moe_router_enable_expert_bias": True,
        "no_kda_lora": True, "rope_interleave": True, "score_function": "sigmoid", "use_bias": False,
        "use_qkv_bias": False, "use_rmsnorm": True,
    },
    unused=("max_window_layers", "mtp_loss_scaling_factor", "output_dropout", "partial_rotary_factor", "router_dtype",
            "linear_num_heads", "use_qk_norm", "group_norm_size", "rotary_dim"),
)  # fmt: skip


def linear_layers(f: Fields, count: int) -> list[bool]:
    """Reads whether each layer has linear attention: all but the last of each group."""
    kinds = from_config.layer_kinds(f, count, (kimi_linear.LINEAR, kimi_linear.FULL))
    period = f.integer("layer_group_size")
    if kinds is None and count % period:
        needed = f"a divisor of num_hidden_layers, {count}, or layer_types must be given"
        raise f.error("layer_group_size", period, needed)
    return from_config.periodic(count, period) if kinds is None else [one == kimi_linear.LINEAR for one in kinds]


def config(f: Fields, outer: Fields) -> ModelSpec:
    for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if any(f.raw(name) or ()):
            raise f.error(name, f.raw(name), "null or zeros: limits of gates are not supported in this family")
    spec = deepseek_v2.model(f, outer)
    shared = f.integer("moe_shared_expert_intermediate_size", None, high=limits.MAX_FFN)
    widths = {ffn.shared_size for ffn in spec.mixtures()}
    if shared and widths - {shared}:
        raise f.error("moe_shared_expert_intermediate_size", shared, f"that of all shared experts, {widths.pop()}")
    heads, width = f.integer("num_attention_heads", high=limits.MAX_HEADS), f.integer("head_dim", high=1 << 10)
    width = f.integer("linear_head_dim", width, high=1 << 10)
    floor = f.number("kda_lower_bound", low=-1e3, high=0.0) if f.flag("kda_safe_gate") else 0.0
    taps = f.integer("short_conv_kernel_size", high=limits.MAX_CONV)
    return with_linear(spec, GatedDeltaNet(heads, heads, width, width, taps, by_row=True, decay_floor=floor),
                       linear_layers(f, len(spec.layers)))  # fmt: skip


def with_linear(spec: ModelSpec, net: GatedDeltaNet, linear: list[bool]) -> ModelSpec:
    """The model with linear attention in the layers that `linear` marks, and gates in the others."""
    mixers = [
        net if is_linear or layer.mixer is None else replace(layer.mixer, gated=True)
        for layer, is_linear in zip(spec.layers, linear, strict=True)
    ]
    return spec.with_layers(mixer=mixers)


def gguf(header: GgufHeader) -> ModelSpec:
    spec = kimi_linear.gguf(header)
    floor = header.fields.number("kda.gate_lower_bound", low=-1e3, high=0.0)
    if not header.fields.flag("kda.safe_gate", True):
        floor = 0.0
    nets = spec.mixers(GatedDeltaNet)
    if not nets:
        raise header.fields.error("attention.head_count_kv", 1, "0 in layers with linear attention")
    rank = header.fields.integer("attention.q_lora_rank", 0, low=0, high=limits.MAX_WIDTH)
    mixers = [
        replace(one.mixer, rope="global", q_lora_rank=rank) if isinstance(one.mixer, LatentAttention) else one.mixer
        for one in spec.layers
    ]
    net, linear = replace(nets[0], gate_rank=0, decay_floor=floor), [one.mixer in nets for one in spec.layers]
    return with_linear(spec.with_layers(mixer=mixers), net, linear)


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model. Raises ArchitectureError if its decays are not bounded."""
    net = next(iter(spec.mixers(GatedDeltaNet)), None)
    if net is None or not net.decay_floor:
        raise ArchitectureError(f"{where}: {spec.family} without bounded decays has no GGUF form")
    more = {"kda.safe_gate": True, "kda.gate_lower_bound": net.decay_floor}
    more["expert_shared_feed_forward_length"] = next((ffn.shared_size for ffn in spec.mixtures()), 0)
    gates = {
        f"blk.{i}.attn_gate.weight": f"blk.{i}.ssm_g_a.weight" for i, one in enumerate(spec.layers) if one.mixer is net
    }
    return replace(kimi_linear.export(spec, where, GGUF, more), names=gates)


def gguf_values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight for GGUF."""
    values = kimi_linear.gguf_values(spec, weight, values)
    return np.abs(values) if weight.endswith(".A_log") else values


KDA = ("A_log", "dt_bias", "o_norm", *(f"{part}_proj" for part in "qkvbfg"), *(f"{part}_conv1d" for part in "qkv"))
MLA = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")
PARTS = {f"attention.{name}": f"self_attn.{name}" for name in (*KDA, *MLA)}
PARTS |= {"attention.dense": "self_attn.o_proj", "attention.o_proj": "self_attn.o_proj"}
PARTS |= {"attention.kv_b_proj": deepseek_v2.KV_B, "mlp.gate.expert_bias": "mlp.gate.e_score_correction.bias"}
OF_GGUF = kimi_linear.PARTS | {"ssm_f_a": "self_attn.f_proj", "ssm_g_a": "self_attn.g_proj"}
OF_GGUF |= {"attn_gate": "self_attn.g_proj"}
FAMILY = replace(
    deepseek_v3.FAMILY,
    keys=KEYS,
    gguf="",
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    gguf_values=gguf_values,
    safetensors=deepseek_v2.SAFETENSORS.but({"model.word_embeddings": "model.embed_tokens"}).but_in_layers(PARTS),
    gguf_names=deepseek_v2.GGUF_NAMES.but_in_layers(OF_GGUF, (r".*\.A_log", "exp")),
)  # fmt: skip
