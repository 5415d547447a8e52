"""Granite with windows: sinks in all layers, and layers without rotation. Three of four layers slide."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import exaone4, granite
from ckdist.models.families.family import Fields, GgufForm, GgufHeader
from ckdist.models.spec import Attention, ModelSpec

PERIOD = 4  # the first layer of each period has no window
KEYS = granite.KEYS.but(
    defaults={
        **sizes(hidden=2560, ffn=8192, layers=24, heads=20, kv_heads=4, positions=8192, vocab=100352),
        "rms_norm_eps": 1e-5, "sliding_window": 128, "tie_word_embeddings": True,
    },
    nulls={"num_key_value_heads": None, "sliding_window": None},
)  # fmt: skip


def with_windows(spec: ModelSpec, window: int, sliding: list[bool], rotates: list[bool]) -> ModelSpec:
    """The model with sinks and windows."""
    mixers = [
        replace(mixer, sinks=True, window=window * slides, rope="global" if turns else None)
        for mixer, slides, turns in zip(spec.mixers(Attention), sliding, rotates, strict=True)
    ]
    return spec.with_layers(mixer=mixers)


def rotated_layers(f: Fields, count: int, usual: list[bool]) -> list[bool]:
    """Reads whether each layer rotates. A base of 0 is for none; the others must have the base of the model."""
    given, theta = f.raw("layer_rope_theta"), f.sub("rope_parameters").number("rope_theta", f.number("rope_theta"))
    if given is None:
        return usual
    if not isinstance(given, list) or len(given) != count or any(one not in (0, None, theta) for one in given):
        raise f.error("layer_rope_theta", given, f"a list of {count} of 0 and {theta:g}")
    return [bool(one) for one in given]


def config(f: Fields, outer: Fields) -> ModelSpec:
    return windowed(granite.config(f, outer), f)


def windowed(spec: ModelSpec, f: Fields) -> ModelSpec:
    """The model with the windows, rotations and sinks of a config.json."""
    count = len(spec.layers)
    sliding = from_config.sliding_layers(f, count, [i % PERIOD != 0 for i in range(count)])
    return with_windows(spec, from_config.window(f), sliding, rotated_layers(f, count, [True] * count))


def gguf(header: GgufHeader) -> ModelSpec:
    if header.is_mixture():
        from ckdist.models.families.granitemoe_swa import experts

        spec = granite.gguf_model(header, experts(header), family="granitemoe_swa")
    else:
        spec = granite.gguf(header)
    f, count, pattern = header.fields, len(spec.layers), "attention.rope_pattern"
    turns = [True] * count
    if f.has(pattern):
        turns = header.but({"attention.sliding_window_pattern": f.raw(pattern)}).sliding_layers(count, 0)
    window = f.integer("attention.sliding_window", high=limits.MAX_POSITION)
    return with_windows(spec, window, header.sliding_layers(count, PERIOD), turns)


def export(spec: ModelSpec, where: str, more: Mapping[str, Any] | None = None) -> GgufForm:
    """Returns the GGUF metadata of a model. `more` are further values."""
    mixers = spec.mixers(Attention)
    rotated = spec.with_layers(mixer=[replace(mixer, rope="global") for mixer in mixers])
    own = {"attention.rope_pattern": [mixer.rope is not None for mixer in mixers], **(more or {})}
    return granite.form("granite_swa", rotated, where, {**exaone4.written(spec, where), **own})


FAMILY = replace(
    granite.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    gguf_names=granite.FAMILY.gguf_names.but_in_layers({"attn_sinks.weight": "self_attn.sinks"}),
)
