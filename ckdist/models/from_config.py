"""Reads the parts of a Hugging Face `config.json` that most families share. It reads no weights.

A file in `families` calls the functions for its family. ConfigKeys has the defaults of absent fields.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckdist.models import limits, rope
from ckdist.models.fields import Fields
from ckdist.models.spec import Attention, DenseFfn, Ffn, LayerSpec, ModelSpec, MoeFfn, Ropes, RopeSpec
from ckdist.program.routing import Routing

ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    "situ": "situ",
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model with identical layers."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float

    def attention(self, scale: float | None = None, **more: Any) -> Attention:
        """The attention of a layer. `scale`: Default: head_dim**-0.5. `more` are further fields of Attention."""
        usual = self.head_dim**-0.5
        return Attention(self.num_heads, self.num_kv_heads, self.head_dim, usual if scale is None else scale, **more)

    def model(self, layers: Sequence[LayerSpec], ropes: Ropes, tied: bool, family: str = "", **more: Any) -> ModelSpec:
        """A model of these sizes. `family`: if it is not the one that reads the file. `more`: fields of ModelSpec."""
        sizes = self.vocab_size, self.hidden_size
        return ModelSpec(family, *sizes, tuple(layers), ropes, self.norm_eps, self.max_position, tied, **more)


def sizes(f: Fields, norm_eps: str = "rms_norm_eps", head_dim: int = 0) -> Sizes:
    """Reads the sizes. `norm_eps` is the name of its field. `head_dim` is given if the family has another field for it.

    Raises ModelFileError for a wrong field.
    """
    hidden_size = f.integer("hidden_size", high=limits.MAX_WIDTH)
    num_heads = f.integer("num_attention_heads", high=limits.MAX_HEADS)
    if not head_dim and f.has("head_dim"):
        head_dim = f.integer("head_dim", high=limits.MAX_HEAD_DIM)
    elif not head_dim and hidden_size % num_heads:
        allowed = f"divisible by num_attention_heads ({num_heads}), or head_dim must be given"
        raise f.error("hidden_size", hidden_size, allowed)
    return Sizes(
        num_layers=f.integer("num_hidden_layers", high=limits.MAX_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=f.integer("num_key_value_heads", num_heads, high=limits.MAX_HEADS),
        head_dim=head_dim or hidden_size // num_heads,
        vocab_size=f.integer("vocab_size", high=limits.MAX_VOCAB),
        max_position=f.integer("max_position_embeddings", high=limits.MAX_POSITION),
        norm_eps=f.number(norm_eps, high=1.0),
    )


def attention(f: Fields, n: Sizes, **more: Any) -> Attention:
    """The attention of a layer: all its projections have biases, or none. `more` are further fields of Attention."""
    bias = f.flag("attention_bias")
    return n.attention(qkv_bias=bias, o_bias=bias, **more)


def model(
    f: Fields, outer: Fields, n: Sizes, layers: Sequence[LayerSpec], ropes: Ropes | None = None, /, **more: Any
) -> ModelSpec:
    """A model of these layers. `ropes`: default: `rotations`. `more` are further fields of ModelSpec."""
    return n.model(layers, rotations(f, n) if ropes is None else ropes, tied(f, outer), **more)


def tied(f: Fields, outer: Fields) -> bool:
    """True if the output projection is tied to the embeddings.

    In a multimodal model, `outer`, the whole config.json, has precedence.
    """
    return outer.flag("tie_word_embeddings", f.flag("tie_word_embeddings"))


def activation(f: Fields, field: str = "hidden_act", known: Mapping[str, str] = ACTIVATIONS) -> str:
    """The activation function. Raises ModelFileError if it is not known."""
    return known[f.choice(field, known)]


def dense(f: Fields, function: str | None = None, bias: bool = False) -> DenseFfn:
    """The gated feed-forward of a layer. `function` is that of its gate; None: the one in the file."""
    size = f.integer("intermediate_size", high=limits.MAX_FFN)
    return DenseFfn(size, function or activation(f), bias)


def experts(f: Fields, count: str, size: str, routing: Routing, function: str | None = None, **more: Any) -> MoeFfn:
    """The experts of a layer. `count` and `size` are the names of the fields for their number and intermediate size.

    `function` is that of their gates; None: the one in the file. `more` are further fields of MoeFfn.
    """
    routing = replace(routing, used=f.integer("num_experts_per_tok", high=limits.MAX_EXPERTS))
    sizes = f.integer(count, high=limits.MAX_EXPERTS), f.integer(size, high=limits.MAX_FFN)
    return MoeFfn(*sizes, routing, function or activation(f), **more)


def dense_layers(f: Fields) -> int:
    """Reads the number of first layers without experts: first_k_dense_replace, or mlp_layer_types of newer files."""
    dense, types = f.integer("first_k_dense_replace", low=0), f.raw("mlp_layer_types")
    if types is None:
        return dense
    count = f.integer("num_hidden_layers", high=limits.MAX_LAYERS)
    if types not in [["dense"] * first + ["sparse"] * (count - first) for first in range(count + 1)]:
        raise f.error("mlp_layer_types", types, f"a list of {count}, first dense ones and then sparse ones")
    return types.count("dense")


def after_dense(dense: Callable[[], DenseFfn], experts: MoeFfn, count: int, layers: int) -> list[Ffn]:
    """The feed-forward of each layer: `count` dense ones, then experts. `dense` is read only if a layer needs it."""
    count = min(count, layers)
    return [*([dense()] * count if count else []), *[experts] * (layers - count)]


def balance(f: Fields) -> dict[str, float]:
    """The coefficient of the load-balancing loss as a field of ModelSpec; empty unless output_router_logits is true."""
    given = f.number("router_aux_loss_coef", low=-1.0, high=1e6)
    return {"balance_coefficient": given} if f.flag("output_router_logits") else {}


def window(f: Fields) -> int:
    """The window of sliding layers in positions; 0 if no layer slides."""
    return f.integer("sliding_window", 0, low=0, high=limits.MAX_POSITION)


def periodic(num_layers: int, period: int) -> list[bool]:
    """True for all layers but the last of each period."""
    return [(i + 1) % period != 0 for i in range(num_layers)]


def sliding_layers(f: Fields, num_layers: int, otherwise: list[bool] | int) -> list[bool]:
    """True for each layer that slides: by `layer_types`. If that is absent: `otherwise`, a period or all layers."""
    usual = periodic(num_layers, otherwise) if isinstance(otherwise, int) else otherwise
    return layers_of_kind(f, num_layers, usual, "sliding_attention", "full_attention")


def layers_of_kind(f: Fields, num_layers: int, usual: list[bool], kind: str, *others: str) -> list[bool]:
    """True for each layer of a kind: by `layer_types`, whose other kinds are `others`. `usual`: if that is absent."""
    kinds = layer_kinds(f, num_layers, (kind, *others))
    return usual if kinds is None else [one == kind for one in kinds]


def layer_kinds(f: Fields, num_layers: int, known: Sequence[Any], name: str = "layer_types") -> list[Any] | None:
    """Reads the kind of each layer, which is one of `known`. None if the field is absent."""
    kinds = f.raw(name)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise f.error(name, kinds, f"a list of {num_layers} of {', '.join(map(str, known[:-1]))} and {known[-1]}")
    return kinds


def part(f: Fields) -> float:
    """The rotated fraction of a head, for families with partial rotation."""
    return f.number("partial_rotary_factor", high=1.0)


def rotations(
    f: Fields, n: Sizes, partial: float | None = None, interleaved: bool = False, mrope_interleaved: bool = False
) -> dict[str, RopeSpec]:
    """The rotation "global" of full layers, and "local" of sliding layers if the file has another one for them.

    Newer files have `rope_parameters`, older ones `rope_theta` and `rope_scaling`. `partial` is the result of `part`;
    None: the family rotates whole heads. `mrope_interleaved` is the family's default of that field.
    """
    parameters = f.sub("rope_parameters")
    nested = parameters.has("full_attention") or parameters.has("sliding_attention")
    theta = f.number("rope_theta", low=1.0)
    shape = rope.RopeShape(n.head_dim, n.max_position, theta, partial, interleaved, mrope_interleaved)
    found = {"global": rope.from_fields(parameters.sub("full_attention") if nested else parameters, shape, f)}
    if nested and parameters.has("sliding_attention"):
        found["local"] = rope.from_fields(parameters.sub("sliding_attention"), shape, f)
    return found
