"""Qwen 3.5, the text part. Three of four layers have linear attention, the others have gated attention.

A quarter of each attention head is rotated. Norms multiply by (1 + weight). GGUF orders the value heads of linear
attention by tiles: the first value head of each key head, then the second of each, and so on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, llama
from ckdist.models.families.family import Family, Fields, Form, GgufHeader, GgufWriter
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, Ffn, LayerSpec, ModelSpec, RopeSpec
from ckdist.models.state_mixers import GatedDeltaNet

KEYS = llama.KEYS.but(
    defaults={  # all: a part of a file may leave out what equals a default
        **sizes(hidden=4096, ffn=12288, layers=32, heads=16, kv_heads=4, head=256, positions=32768, vocab=248320),
        "attn_output_gate": True, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "partial_rotary_factor": 0.25,
    },
    only={"attn_output_gate": True},
)  # fmt: skip
PERIOD = 4  # the last layer of each period has attention
LINEAR, FULL = "linear_attention", "full_attention"
ROTATION = {"theta": 1e7, "partial": True}  # in GGUF files
SECTIONS = 11, 11, 10  # frequencies of time, height and width; a text has the same position in all three


def delta_net(f: Fields) -> GatedDeltaNet:
    """Reads the linear attention from a config.json."""
    return GatedDeltaNet(
        f.integer("linear_num_key_heads", high=limits.MAX_HEADS),
        f.integer("linear_num_value_heads", high=limits.MAX_HEADS),
        f.integer("linear_key_head_dim", high=limits.MAX_HEAD_DIM),
        f.integer("linear_value_head_dim", high=limits.MAX_HEAD_DIM),
        f.integer("linear_conv_kernel_dim", low=2, high=limits.MAX_CONV),
    )


def model(f: Fields, outer: Fields, ffns: Callable[[int], Sequence[Ffn]]) -> ModelSpec:
    """Reads a config.json. `ffns(layers)` are the feed-forwards."""
    n = from_config.sizes(f)
    attention, linear = n.attention(qk_norm="head", gated="sigmoid"), delta_net(f)
    usual = from_config.periodic(n.num_layers, f.integer("full_attention_interval"))
    linears = from_config.layers_of_kind(f, n.num_layers, usual, LINEAR, FULL)
    mixers = [linear if is_linear else attention for is_linear in linears]
    layers = [LayerSpec(mixer, ffn) for mixer, ffn in zip(mixers, ffns(n.num_layers), strict=True)]
    ropes = from_config.rotations(f, n, from_config.part(f), mrope_interleaved=True)
    return from_config.model(f, outer, n, layers, ropes)


def config(f: Fields, outer: Fields) -> ModelSpec:
    return model(f, outer, lambda count: [from_config.dense(f)] * count)


def gguf_mixers(header: GgufHeader, n: Sizes, tiled: bool, **more: Any) -> list[Attention | GatedDeltaNet]:
    """Reads the mixers of all layers from GGUF metadata. `more` are further fields of linear attention.

    Raises ModelFileError if the numbers do not fit together.
    """
    f = header.fields
    keys, values = (f.integer(f"ssm.{name}", high=limits.MAX_HEADS) for name in ("group_count", "time_step_rank"))
    key_dim = f.integer("ssm.state_size", high=limits.MAX_HEAD_DIM)
    inner = f.integer("ssm.inner_size", high=limits.MAX_WIDTH)
    if inner != values * key_dim:
        raise f.error("ssm.inner_size", inner, f"ssm.time_step_rank times ssm.state_size, {values * key_dim}")
    kernel = f.integer("ssm.conv_kernel", low=2, high=limits.MAX_CONV)
    linear = GatedDeltaNet(keys, values, key_dim, key_dim, kernel, tiled and keys != values, **more)
    attention = n.attention(scale=f.number("attention.scale", n.head_dim**-0.5), qk_norm="head", gated="sigmoid")
    return [linear if is_linear else attention for is_linear in gguf_linear_layers(f, n.num_layers)]


def gguf_linear_layers(f: Fields, num_layers: int) -> list[bool]:
    """Reads from GGUF metadata whether each layer has linear attention."""
    name = "attention.recurrent_layers"
    flags = f.raw(name)
    if flags is None:
        return from_config.periodic(num_layers, f.integer("full_attention_interval", PERIOD))
    if not isinstance(flags, np.ndarray) or flags.dtype != bool or len(flags) < num_layers:
        raise f.error(name, flags, f"one flag for each of {num_layers} layers")
    return flags[:num_layers].tolist()


def gguf(header: GgufHeader) -> ModelSpec:
    n, ffn = header.sizes(), header.dense()
    layers = [LayerSpec(mixer, ffn) for mixer in gguf_mixers(header, n, tiled=True)]
    return header.model(n, layers, {"global": gguf_rotation(header, n)})


def hybrid_metadata(spec: ModelSpec, where: str) -> dict[str, object]:
    """The GGUF metadata of the mixers. Raises ArchitectureError for a model that this metadata cannot describe."""
    linear = next(iter(spec.mixers(GatedDeltaNet)), None)
    if linear is None or linear.key_dim != linear.value_dim:
        raise ArchitectureError(
            f"{where}: a model without linear attention, or with values of another width than keys, has no GGUF form"
        )
    return {
        "ssm.conv_kernel": linear.conv_kernel,
        "ssm.state_size": linear.key_dim,
        "ssm.group_count": linear.num_key_heads,
        "ssm.time_step_rank": linear.num_value_heads,
        "ssm.inner_size": linear.num_value_heads * linear.value_dim,
        "attention.recurrent_layers": [isinstance(layer.mixer, GatedDeltaNet) for layer in spec.layers],
        "rope.dimension_count": spec.ropes["global"].dims,
    }


def gguf_rotation(header: GgufHeader, n: Sizes) -> RopeSpec:
    """Reads the rotation from GGUF metadata, with its frequencies for time, height and width."""
    return header.three_axes(header.rotation(n, **ROTATION), is_interleaved=True)


def written_sections(spec: ModelSpec, where: str) -> dict[str, Any]:  # noqa: ARG001
    """GGUF metadata: the numbers of a rotation's frequencies for time, height, width, and for nothing."""
    rope = spec.ropes["global"]
    frequencies = rope.dims // 2
    height, width = (frequencies * part // sum(SECTIONS) for part in SECTIONS[1:])
    numbers = (
        [rope.axes.count(axis) for axis in range(3)] if rope.axes else [frequencies - height - width, height, width]
    )
    return {"rope.dimension_sections": [*numbers, 0]}


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    return {**hybrid_metadata(spec, where), **written_sections(spec, where)}


def gguf_values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight for GGUF: value heads of linear attention in the order of tiles."""
    if ".linear_attn." not in weight:
        return values
    mixer, name = spec.layer_of(weight).mixer, weight.split(".", 3)[-1]
    assert isinstance(mixer, GatedDeltaNet)
    values = hybrid_values(mixer, name, values)
    if name in TILED_COLUMNS:
        return tiled(mixer, values.T).T
    return tiled(mixer, values) if name in TILED_ROWS else values


def hybrid_values(linear: GatedDeltaNet, name: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight, without reordering heads: -exp(A_log), and a convolution's row per channel."""
    if name == "linear_attn.A_log":
        return -np.exp(values)
    return values.reshape(-1, linear.conv_kernel) if ".conv1d_" in name else values


def tiled(linear: GatedDeltaNet, rows: np.ndarray) -> np.ndarray:
    """Reorders rows by tiles: the first value head of each key head, then the second of each, and so on."""
    each = linear.num_value_heads // linear.num_key_heads
    heads = rows.reshape(linear.num_key_heads, each, -1, *rows.shape[1:])
    return heads.swapaxes(0, 1).reshape(rows.shape)


TILED_COLUMNS = ("linear_attn.out_proj.weight",)
TILED_ROWS = (
    *(f"linear_attn.{part}.weight" for part in ("in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d_v")),
    "linear_attn.A_log",
    "linear_attn.dt_bias",
)
QKV = ("linear_attn.in_proj_q", "linear_attn.in_proj_k", "linear_attn.in_proj_v")
CONV = ("linear_attn.conv1d_q", "linear_attn.conv1d_k", "linear_attn.conv1d_v")
GATED_QUERY = ("self_attn.q_proj", "self_attn.gate_proj")
GATED: tuple[str, Form] = (r".*self_attn\.q_proj\.\w+", "joined")
PLUS_ONE: tuple[str, Form] = (r".*(?<!linear_attn\.)norm\.weight", "plus_one")
SAFETENSORS = family.SAFETENSORS.but_in_layers(
    {"self_attn.q_proj": GATED_QUERY, "linear_attn.in_proj_qkv": QKV, "linear_attn.conv1d": CONV},
    GATED,
    PLUS_ONE,
)
GGUF = family.GGUF.but_in_layers(
    {
        "post_attention_norm": "post_attention_layernorm",
        "attn_q": GATED_QUERY,
        "attn_qkv": QKV,
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": CONV,
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
    },
    (r".*\battn_q\.\w+", "joined"),
    (r".*\.A_log", "minus_exp"),
)
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written),
    safetensors=SAFETENSORS,
    gguf_names=GGUF,
    gguf_values=gguf_values,
)
