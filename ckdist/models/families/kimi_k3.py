"""Text of Kimi-K3: Kimi-Linear with attention residuals, experts of a latent space and gated latent attention.

Kimi Team 2026, arXiv:2607.24653.
"""

from dataclasses import replace

from ckdist.models import limits
from ckdist.models.families import deepseek_v2, family, kimi_linear
from ckdist.models.families.family import GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.residual_streams import BlockResiduals
from ckdist.models.spec import LatentAttention, ModelSpec, MoeFfn
from ckdist.models.state_mixers import GatedDeltaNet

SITU = "situ"
BETAS = {"situ_beta": 4.0, "situ_linear_beta": 25.0}  # of the activation
KEYS = kimi_linear.KEYS.but(
    defaults={"attn_res_block_size": 12, "hidden_act": SITU, "latent_moe_use_norm": True},
    only={**{f"activation_{name}": beta for name, beta in BETAS.items()}, "mla_use_output_gate": True},
)


def changed(spec: ModelSpec, size: int, floor: float, latent: int, norm: bool, rank: int) -> ModelSpec:
    """The model, read as a Kimi-Linear, with K3's parts. `size`: of blocks; `floor`: of decays; `rank`: of queries."""
    mixers, ffns = [], []
    for layer in spec.layers:
        if isinstance(layer.mixer, GatedDeltaNet):
            mixers.append(replace(layer.mixer, full_gate=True, decay_floor=floor))
        elif isinstance(layer.mixer, LatentAttention):
            mixers.append(replace(layer.mixer, gated=True, element_gates=True, norm_eps=0.0, q_lora_rank=rank))
        more = {"latent": latent, "latent_norm": bool(latent) and norm} if isinstance(layer.ffn, MoeFfn) else {}
        ffns.append(layer.ffn and replace(layer.ffn, activation=SITU, **more))
    return replace(spec.with_layers(mixer=mixers, ffn=ffns), block_residuals=BlockResiduals(size))


def config(f: Fields, outer: Fields) -> ModelSpec:
    spec, own = kimi_linear.config(f, outer), f.sub("linear_attn_config")
    if not own.flag("use_full_rank_gate", True):
        raise own.error("use_full_rank_gate", False, "true: K3's gates have one matrix")
    f.choice("hidden_act", (SITU,))
    floor = own.number("gate_lower_bound", 0.0, low=-1e3, high=0.0)
    latent = f.integer("routed_expert_hidden_size", None, high=limits.MAX_WIDTH) or 0
    norm, size = f.flag("latent_moe_use_norm"), f.integer("attn_res_block_size", high=limits.MAX_LAYERS)
    return changed(spec, size, floor, latent, norm, deepseek_v2.q_lora_rank(f))


def gguf(header: GgufHeader) -> ModelSpec:
    f, spec = header.fields, kimi_linear.gguf(header)
    for name, known in BETAS.items():
        if f.number(f"activation.{name}") != known:
            raise f.error(f"activation.{name}", f.values[f"activation.{name}"], f"{known:g}")
    floor = f.number("kda.gate_lower_bound", 0.0, low=-1e3, high=0.0)
    latent = f.integer("expert_latent_length", 0, low=0, high=limits.MAX_WIDTH)
    rank = f.integer("attention.q_lora_rank", 0, low=0, high=limits.MAX_WIDTH)
    size = f.integer("attn_res.block_size", high=limits.MAX_LAYERS)
    spec = changed(spec, size, floor, latent, header.has_any(".ffn_routed_norm.weight"), rank)
    return replace(spec, block_residuals=BlockResiduals(size, normed=False))


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    linear = [i for i, layer in enumerate(spec.layers) if isinstance(layer.mixer, GatedDeltaNet)]
    more = {f"activation.{name}": beta for name, beta in BETAS.items()}
    if spec.block_residuals:
        more["attn_res.block_size"] = spec.block_residuals.size
    if floor := min((mixer.decay_floor for mixer in spec.mixers(GatedDeltaNet)), default=0.0):
        more["kda.gate_lower_bound"] = floor
    more["expert_latent_length"] = max((ffn.latent for ffn in spec.mixtures()), default=0)
    gates = {f"blk.{i}.attn_gate.weight": f"blk.{i}.ssm_g.weight" for i in linear}
    return replace(kimi_linear.export(spec, where, "kimi-k3", more), names=gates)


LATENT = {"down": "latent_down_proj", "up": "latent_up_proj", "norm": "latent_norm"}
STORED = {f"block_sparse_moe.routed_expert_{part}_proj": f"mlp.{LATENT[part]}" for part in ("down", "up")}
STORED["block_sparse_moe.routed_expert_norm"] = "mlp.latent_norm"
OF_GGUF = {f"ffn_routed_{part}": f"mlp.{name}" for part, name in LATENT.items()}
OF_GGUF |= {"ssm_g": "self_attn.g_proj", "attn_gate": "self_attn.g_proj"}
OF_GGUF |= {"attn_res_score": "self_attention_res_proj", "ffn_res_score": "mlp_res_proj"}
FAMILY = replace(
    kimi_linear.FAMILY,
    keys=KEYS,
    gguf="",
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    gguf_factors={"_res_proj.weight": "_res_norm.weight"},
    safetensors=kimi_linear.FAMILY.safetensors.but_in_layers(STORED, (r".*\.A_log", "padded")),
    gguf_names=kimi_linear.FAMILY.gguf_names.but({"output_res_score": "model.output_attn_res_proj"}).but_in_layers(
        OF_GGUF
    ),
    ignored=(*kimi_linear.FAMILY.ignored, *family.ROTATIONS),
)
