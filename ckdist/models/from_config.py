"""What the `config.json` of a Hugging Face folder says in the same way for most families. It reads no weights.

A file in `families` takes of it what its family has; absent fields take the defaults of transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckdist.models import limits, rope
from ckdist.models.fields import Fields
from ckdist.models.spec import LayerSpec, ModelSpec, MoeFfn, RopeSpec
from ckdist.program.routing import Routing

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class ConfigDefaults:
    """What fields mean where they are absent; None: they must be there. 0 kv-heads: as many as heads."""

    max_position: int
    layers: int | None = None
    heads: int | None = None
    kv_heads: int = 0
    head_dim: int | None = None  # None: hidden_size / heads
    vocab: int | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder whose layers are alike."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float

    def model(
        self, family: str, layers: Sequence[LayerSpec], ropes: Mapping[str, RopeSpec], tied: bool, **more: Any
    ) -> ModelSpec:
        """A model of these sizes; `more` are further fields of a ModelSpec."""
        sizes = self.vocab_size, self.hidden_size
        return ModelSpec(family, *sizes, tuple(layers), ropes, self.norm_eps, self.max_position, tied, **more)


def sizes(f: Fields, default: ConfigDefaults) -> Sizes:
    """The sizes in a config.json. ModelFileError for a wrong one."""
    of = lambda name, absent, high: f.integer(name, *([] if absent is None else [absent]), high=high)
    hidden_size = f.integer("hidden_size", high=limits.MAX_WIDTH)
    num_heads = of("num_attention_heads", default.heads, limits.MAX_HEADS)
    if f.has("head_dim"):
        head_dim = f.integer("head_dim", high=limits.MAX_HEAD_DIM)
    elif default.head_dim is not None:
        head_dim = default.head_dim
    elif hidden_size % num_heads:
        raise f.error(
            "hidden_size", hidden_size, f"divisible by num_attention_heads ({num_heads}), or head_dim must be given"
        )
    else:
        head_dim = hidden_size // num_heads
    return Sizes(
        num_layers=of("num_hidden_layers", default.layers, limits.MAX_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=f.integer("intermediate_size", high=limits.MAX_FFN),
        num_heads=num_heads,
        num_kv_heads=f.integer("num_key_value_heads", default.kv_heads or num_heads, high=limits.MAX_HEADS),
        head_dim=head_dim,
        vocab_size=of("vocab_size", default.vocab, limits.MAX_VOCAB),
        max_position=f.integer("max_position_embeddings", default.max_position, high=limits.MAX_POSITION),
        norm_eps=f.number("rms_norm_eps", default.norm_eps, high=1.0),
    )


def tied(f: Fields, outer: Fields, default: bool = False) -> bool:
    """Whether the output projection is the embeddings; `outer` is the config.json of a multimodal model."""
    return f.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", default))


def activation(f: Fields, field: str = "hidden_act", default: str = "silu") -> str:
    """The gate's function. ModelFileError where it is not known."""
    name = f.text(field, default)
    if name not in ACTIVATIONS:
        raise f.error(field, name, f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def experts(f: Fields, count: str, size: str, routing: Routing, **more: Any) -> MoeFfn:
    """The experts of a layer, whose number and intermediate size are in these fields; of them
    `num_experts_per_tok` are taken, where it is absent `routing.used`. `more` are further fields of a MoeFfn.
    """
    routing = replace(routing, used=f.integer("num_experts_per_tok", routing.used, high=limits.MAX_EXPERTS))
    return MoeFfn(
        f.integer(count, high=limits.MAX_EXPERTS),
        f.integer(size, high=limits.MAX_FFN),
        routing,
        activation(f),
        **more,
    )


def balance(f: Fields, coefficient: float = 0.001) -> dict[str, float]:
    """The coefficient of the load-balancing loss, as a field of a ModelSpec; where the file gives none `coefficient`.
    None where routers' logits are no output.
    """
    given = f.number("router_aux_loss_coef", coefficient, low=0.0, high=1e6)
    return {"balance_coefficient": given} if f.flag("output_router_logits") else {}


def window(f: Fields, absent: int = 4096) -> int:
    """Positions that sliding layers see; 0: none slides. A null means none, an absent field `absent`."""
    return f.integer("sliding_window", 0 if "sliding_window" in f.values else absent, low=0, high=limits.MAX_POSITION)


def sliding_layers(f: Fields, num_layers: int, otherwise: list[bool]) -> list[bool]:
    """Which layers slide: as `layer_types` says, else `otherwise`."""
    types = f.values.get("layer_types")
    if types is None:
        return otherwise
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(t not in known for t in types):
        raise f.error("layer_types", types, f"a list of {num_layers} of {' and '.join(known)}")
    return [t == "sliding_attention" for t in types]


def rotations(
    f: Fields, n: Sizes, theta: float = 1e4, partial: float | None = None, interleaved: bool = False
) -> dict[str, RopeSpec]:
    """The rotation of full layers, "global", and where the file has another for sliding ones, "local".

    Newer files write `rope_parameters`, older ones `rope_theta` and `rope_scaling`.
    `theta` and `partial` (the part of a head that is rotated): where the file gives none. A `partial` of None: the
    family has no `partial_rotary_factor`, and all of a head is rotated, as in transformers 5.
    """
    theta = f.number("rope_theta", theta, low=1.0)
    if partial is not None:
        partial = f.number("partial_rotary_factor", partial, high=1.0)
    parameters = f.sub("rope_parameters") if f.has("rope_parameters") else f.sub("rope_scaling")
    nested = parameters.has("full_attention") or parameters.has("sliding_attention")
    shape = rope.RopeShape(n.head_dim, n.max_position, theta, partial, interleaved)
    found = {"global": rope.from_fields(parameters.sub("full_attention") if nested else parameters, shape, f)}
    if nested and parameters.has("sliding_attention"):
        found["local"] = rope.from_fields(parameters.sub("sliding_attention"), shape, f)
    return found
