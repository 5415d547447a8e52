"""Granite with windows: sinks in all layers, and layers without rotation. Three of four layers slide."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import exaone4, granite
from ckdist.models.families.family import Fields, GgufForm, GgufHeader, ModelSpec

NAME, PERIOD = "granite_swa", 4  # the first layer of each period has no window
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
        replace(one.attention, sinks=True, window=window * slides, rope="global" if turns else None)
        for one, slides, turns in zip(spec.layers, sliding, rotates, strict=True)
    ]
    layers = [replace(layer, mixer=mixer) for layer, mixer in zip(spec.layers, mixers, strict=True)]
    return replace(spec, family=NAME, layers=tuple(layers))


def rotated_layers(f: Fields, count: int, usual: list[bool]) -> list[bool]:
    """Reads whether each layer rotates. A base of 0 is for none; the others must have the base of the model."""
    given, theta = f.raw("layer_rope_theta"), f.sub("rope_parameters").number("rope_theta", f.number("rope_theta"))
    if given is None:
        return usual
    if not isinstance(given, list) or len(given) != count or any(one not in (0, None, theta) for one in given):
        raise f.error("layer_rope_theta", given, f"a list of {count} of 0 and {theta:g}")
    return [bool(one) for one in given]


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    return windowed(granite.config(f, outer), f)


def windowed(spec: ModelSpec, f: Fields) -> ModelSpec:
    """The model with the windows, rotations and sinks of a config.json."""
    count = len(spec.layers)
    sliding = from_config.sliding_layers(f, count, [i % PERIOD != 0 for i in range(count)])
    return with_windows(spec, from_config.window(f), sliding, rotated_layers(f, count, [True] * count))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    if from_gguf.is_mixture(header):
        from ckdist.models.families.granitemoe_swa import experts

        spec, name = granite.gguf_model(NAME, header, experts(header)), "granitemoe_swa"
    else:
        spec, name = granite.gguf(header), NAME
    f = header.fields
    rotates = f.raw("attention.rope_pattern")
    turns = [True] * len(spec.layers) if rotates is None else from_gguf.sliding_layers(
        Fields({"attention.sliding_window_pattern": rotates}, f.where, f.prefix), len(spec.layers), 0)  # fmt: skip
    window = f.integer("attention.sliding_window", high=1 << 30)
    sliding = from_gguf.sliding_layers(f, len(spec.layers), PERIOD)
    return replace(with_windows(spec, window, sliding, turns), family=name)


def export(spec: ModelSpec, where: str, more: Mapping[str, Any] | None = None) -> GgufForm:
    """Returns the GGUF metadata of a model. `more` are further values."""
    rotated = replace(
        spec, layers=tuple(replace(one, mixer=replace(one.attention, rope="global")) for one in spec.layers)
    )
    pattern: dict[str, Any] = {"attention.rope_pattern": [one.attention.rope is not None for one in spec.layers]}
    return granite.form(NAME, rotated, where, {**exaone4.written(spec, where), **pattern, **(more or {})})


FAMILY = replace(
    granite.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    gguf_names=granite.FAMILY.gguf_names.but_in_layers({"attn_sinks.weight": "self_attn.sinks"}),
)
