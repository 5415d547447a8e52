"""gpt-oss: experts with biases and a clamped gate, sinks in attention, a window in every other layer.

In its files, the rows of the experts' gate and up alternate. They are in MXFP4, as published, or in floats with inputs
as rows.
"""

from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, LayerSpec, ModelSpec, MoeFfn, RopeSpec
from ckdist.program.ops.elementwise import SWIGLU_ALPHA, SWIGLU_LIMIT
from ckdist.program.routing import Routing

NAME = "gpt-oss"
ROUTING = Routing(used=4)
THETA = 150000.0
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}  # if absent
KEYS = ConfigKeys(
    {
        **sizes(kv_heads=8, head=64, positions=131072),
        "attention_bias": True, "hidden_act": "silu", "num_experts_per_tok": 4, "rms_norm_eps": 1e-5,
        "rope_parameters": YARN, "rope_theta": THETA, "sliding_window": 128, "swiglu_alpha": SWIGLU_ALPHA,
        "swiglu_limit": SWIGLU_LIMIT,
    },
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    nulls={"sliding_window": None},
    unused=("initial_context_length",),  # the scaling has it
)  # fmt: skip
ACTIVATION = "clamped_swiglu"
PERIOD = 2  # the last layer of each period has no window


def model(
    n: Sizes, attention: Attention, ffn: MoeFfn, window: int, sliding: list[bool], rotation: RopeSpec, tied: bool
) -> ModelSpec:
    """Makes a model. Layers marked in `sliding` have a window of `window` positions."""
    layers = [LayerSpec(replace(attention, window=window * slides), ffn) for slides in sliding]
    return n.model(NAME, layers, {"global": rotation}, tied)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    for name, known in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if f.number(name) != known:
            raise f.error(name, f.values[name], f"{known:g}")
    biased = f.flag("attention_bias")
    attention = n.attention(qkv_bias=biased, o_bias=biased, sinks=True)
    experts = from_config.experts(f, "num_local_experts", "intermediate_size", ROUTING, bias=True)
    if experts.activation != "silu":
        raise f.error("hidden_act", f.text("hidden_act"), "silu: this family has only a clamped SwiGLU")
    window = from_config.window(f)
    sliding = from_config.sliding_layers(f, n.num_layers, PERIOD)
    rotation = from_config.rotations(f, n)["global"]
    ffn = replace(experts, activation=ACTIVATION)
    return model(n, attention, ffn, window, sliding, rotation, from_config.tied(f, outer))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata. This family's YaRN does not truncate the limits of its blend to whole dimensions."""
    from ckdist.models import from_gguf

    n = from_gguf.sizes(header)
    attention = replace(from_gguf.attention(header, n), sinks=True)
    experts = replace(from_gguf.experts(header, ROUTING), activation=ACTIVATION, bias=True)
    window = header.fields.integer("attention.sliding_window", low=0)
    sliding = from_gguf.sliding_layers(header.fields, n.num_layers, PERIOD)
    rotation = from_gguf.rotation(header, n, THETA, truncate=False)
    return model(n, attention, experts, window, sliding, rotation, from_gguf.tied(header))


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError if the pattern of windows is not the usual one."""
    windows = [layer.attention.window for layer in spec.layers]
    usual = from_config.periodic(len(windows), PERIOD)
    if not any(windows) or windows != [max(windows) * slides for slides in usual]:
        raise ArchitectureError(f"{where}: gpt-oss whose layers do not slide by turns has no GGUF form")
    return {"attention.sliding_window": max(windows)}


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, experts=(), truncate=False),
    safetensors=family.SAFETENSORS_EXPERTS.but_in_layers(
        {"mlp.router": "mlp.gate"},
        (r".*mlp\.experts\.(gate_up|down)_proj\.\w+", "stacked"),
        (r".*mlp\.experts\.gate_up_proj\.\w+", "alternating"),
        (r".*mlp\.experts\.(gate_up|down)_proj\.weight", "transposed"),
    ),
    gguf_names=family.GGUF_EXPERTS.but(
        {**family.POST_ATTENTION_NORM, "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks"}
    ),
)
