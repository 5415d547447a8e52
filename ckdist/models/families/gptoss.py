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
from ckdist.models.spec import Attention, LayerSpec, ModelSpec, MoeFfn
from ckdist.program.ops.elementwise import SWIGLU_ALPHA, SWIGLU_LIMIT
from ckdist.program.routing import Routing

ROUTING = Routing(used=4)
THETA = 150000.0
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}  # if absent
ACTIVATION = "clamped_swiglu"
SWIGLU = {"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT}
KEYS = ConfigKeys(
    {
        **sizes(kv_heads=8, head=64, positions=131072),
        "attention_bias": True, "hidden_act": "silu", "num_experts_per_tok": 4, "rms_norm_eps": 1e-5,
        "rope_parameters": YARN, "rope_theta": THETA, "sliding_window": 128,
    },
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    nulls={"sliding_window": None},
    only={**SWIGLU, "hidden_act": "silu"},  # the gate is always a clamped SwiGLU
    unused=("initial_context_length",),  # the scaling has it
)  # fmt: skip
PERIOD = 2  # the last layer of each period has no window


def layers(attention: Attention, ffn: MoeFfn, window: int, sliding: list[bool]) -> list[LayerSpec]:
    """Makes the layers. Those marked in `sliding` have a window of `window` positions."""
    return [LayerSpec(replace(attention, window=window * slides), ffn) for slides in sliding]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    ffn = from_config.experts(f, "num_local_experts", "intermediate_size", ROUTING, ACTIVATION, bias=True)
    sliding = from_config.sliding_layers(f, n.num_layers, PERIOD)
    made = layers(from_config.attention(f, n, sinks=True), ffn, from_config.window(f), sliding)
    return from_config.model(f, outer, n, made, {"global": from_config.rotations(f, n)["global"]})


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata. This family's YaRN does not truncate the limits of its blend to whole dimensions."""
    n, window = header.sizes(), header.fields.integer("attention.sliding_window", low=0)
    attention = replace(header.attention(n), sinks=True)
    experts = replace(header.experts(ROUTING), activation=ACTIVATION, bias=True)
    made = layers(attention, experts, window, header.sliding_layers(n.num_layers, PERIOD))
    return header.model(n, made, {"global": header.rotation(n, THETA, truncate=False)})


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError if the pattern of windows is not the usual one."""
    windows = [mixer.window for mixer in spec.mixers(Attention)]
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
    gguf_names=family.GGUF_EXPERTS.but(family.POST_ATTENTION_NORM).but_in_layers(
        {"attn_sinks.weight": "self_attn.sinks"}
    ),
)
