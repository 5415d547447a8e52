"""The definition of a family: names in files, reading and writing of a ModelSpec, names of tensors."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from ckdist.models.config_keys import ConfigKeys
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec, Norms
from ckdist.program.routing import Routing

if TYPE_CHECKING:  # a config.json has none
    from ckdist.models import from_gguf

GgufHeader: TypeAlias = "from_gguf.GgufHeader"
_NUMBERED = re.compile(r"(.*?)\.(0|[1-9]\d{0,3})\.(.+)")
_EXPERT = re.compile(r"(.+\.(?:experts|ngram_embedding))\.(?:shard_)?(0|[1-9]\d{0,4})\.(.+)")


_STACK = re.compile(r"(.+\.experts\.(?:gate_up_proj|down_proj))(_bias)?")
_CORRECTION = "e_score_correction_bias"
_PROJECTIONS = "model.projection_"  # in all families


def stack_of(stored: str) -> tuple[str, int | None]:
    """(name of the stack, index of the matrix) of a stored tensor. The index is None if the tensor is not one matrix
    of a stack.
    """
    match = _EXPERT.fullmatch(stored)
    if match:
        return f"{match[1]}.{match[3]}", int(match[2])
    if stored.endswith(f".{_CORRECTION}"):
        return f"{stored.removesuffix('_bias')}.bias", None
    stack = _STACK.fullmatch(stored)
    return f"{stack[1]}.{'bias' if stack[2] else 'weight'}" if stack else stored, None


def _with_correction(name: str) -> str:
    """The inverse of `stack_of` for the name of a correction bias."""
    stem = name.removesuffix(".bias")
    return f"{stem}_bias" if name != stem and f"{stem}_bias".endswith(_CORRECTION) else name


Target: TypeAlias = str | tuple[str, ...]
Form: TypeAlias = Literal[
    # the name is that of a weight
    "interleaved",  # the two halves of each head are stored interleaved
    "plus_one",  # weight = stored + 1
    "minus_exp",  # weight = log(-stored)
    "exp",  # weight = log(stored)
    "rank_scaled",  # weight = stored * sqrt(hidden size / elements of the vector)
    "padded",  # a vector, stored with further elements that are not read
    "by_head",  # stored as a stack with one matrix per head
    # the name is that of a stored tensor
    "joined",  # for each head it has rows of one weight, then of the next
    "one_row",  # a vector is stored as a matrix of one row
    "stack",  # one tensor is a stack with the matrix of each weight
    "stacked",  # one tensor has the matrices of all experts
    "alternating",  # the rows of several weights alternate
    "transposed",  # its matrices, if they are floats, have inputs as rows
    "transposed_or_not",  # the same, unless their shape is that of the weights
    "keys_values",  # for each head it has the rows that make keys, then those that make values
]


def in_layers(prefix: str, parts: Mapping[str, Target], root: str = "model.layers.{}") -> dict[str, Target]:
    """Rules for parts of a layer. `prefix` comes before the layer's number; `parts` maps stored names to weights."""
    return {
        f"{prefix}.{{}}.{name}": tuple(f"{root}.{part}" for part in _several(target)) for name, target in parts.items()
    }


@dataclass(frozen=True)
class TensorNames:
    """The names and forms of a family's weights in files of one format. Elsewhere weights have Hugging Face's names.

    Attributes:
        rules: Stored name -> its weight, or several if the tensor stacks their rows, or () if it is not read. `{}` is
            the number of the layer, and `{next}` in a weight the number after it. A rule without `.weight` or `.bias`
            is for both; one with it comes first. Writing uses the last rule of a weight.
        forms: (pattern, form): the form of all tensors or weights with such a name.
        own_names: A name without a rule is unchanged (safetensors); else it is not read.
        outer: Optional prefix of all names, if the model is a part of the file.
        layers: Prefix of the names of a layer's tensors.
    """

    rules: Mapping[str, Target] = field(default_factory=dict)
    forms: tuple[tuple[str, Form], ...] = ()
    own_names: bool = False
    outer: str = ""
    layers: str = "blk"

    def but(self, rules: Mapping[str, Target], *forms: tuple[str, Form]) -> "TensorNames":
        """These names with other and further rules and forms."""
        return replace(self, rules={**self.rules, **rules}, forms=(*self.forms, *forms))

    def but_in_layers(self, parts: Mapping[str, Target], *forms: tuple[str, Form]) -> "TensorNames":
        """These names with other and further ones of parts of a layer, and further forms."""
        return self.but(in_layers(self.layers, parts), *forms)

    def has(self, form: Form, name: str) -> bool:
        """True if a stored tensor or a weight has a form."""
        return any(form == one and re.fullmatch(pattern, name) for pattern, one in self.forms)

    def uses(self, form: Form) -> bool:
        """True if any tensor or weight has a form."""
        return any(form == one for _, one in self.forms)

    def weights_of(self, stored: str) -> tuple[str, ...]:
        """The weights in a stored tensor; empty if the forward does not read it."""
        if stored.startswith(_PROJECTIONS):
            return (stored,)
        name = _text_part(stored) if self.own_names else stored.removeprefix(self.outer)
        number, keys = _keys(name)
        for key, kind in keys:
            if key in self.rules:
                targets = _several(self.rules[key])
                return tuple(f"{target.format(number, next=number + 1)}{kind}" for target in targets)
        return (name,) if self.own_names else ()

    def stored(self, weights: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Stored name -> its weights, in the order of `weights`. The inverse of `weights_of`."""
        by_target = {one: (name, _several(target)) for name, target in self.rules.items() for one in _several(target)}
        found = {}
        for weight in weights:
            number, keys = _keys(weight)
            rule = next(((*by_target[key], kind) for key, kind in keys if key in by_target), (weight, (weight,), ""))
            name, *parts = (f"{one.format(number)}{rule[2]}" for one in (rule[0], *rule[1]))
            found[_with_correction(name)] = tuple(parts)
        return found

    def stored_matrix(self, weight: str, index: int) -> str:
        """The stored name of one matrix of a stack, if each has its own tensor. The inverse of `stack_of`."""
        alone = TensorNames({name: one for name, one in self.rules.items() if len(_several(one)) == 1})
        (stored,) = alone.stored([weight])
        experts, part, kind = stored.rsplit(".", 2)
        return f"{experts}.{index}.{part}.{kind}"


def _keys(name: str) -> tuple[int, list[tuple[str, str]]]:
    """The number of the layer in a name, and (key of a rule, rest of the name) for the rules that may be for it."""
    match = _NUMBERED.fullmatch(name)
    key = f"{match[1]}.{{}}.{match[3]}" if match else name
    stem, _, kind = key.rpartition(".")
    keys = [(key, ""), (stem, f".{kind}")] if kind in ("weight", "bias") else [(key, "")]
    keys.append((name.rpartition(".")[0], f".{kind}"))  # a rule for this number alone
    return int(match[2]) if match else 0, [] if "{" in name else keys


def _several(target: Target) -> tuple[str, ...]:
    """A name or a tuple of names, as a tuple."""
    return (target,) if isinstance(target, str) else target


def _text_part(name: str) -> str:
    """Removes the part of a tensor's name that marks the text part of a multimodal model."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name


@dataclass(frozen=True)
class GgufForm:
    """A ModelSpec in GGUF's form: metadata, small float32 tensors by name, and other names of tensors."""

    metadata: Mapping[str, Any]
    vectors: Mapping[str, np.ndarray] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GgufReader:
    """Describes how models with identical layers are read from GGUF. `GgufHeader.uniform` reads them.

    Attributes:
        routing: Defaults of the experts. None: layers have a dense feed-forward.
        shared: There is a shared expert.
        attention: Fields of Attention that files lack.
        rotation: Arguments of `GgufHeader.rotation`.
        axes: Whether the frequencies for time, height and width are interleaved. None: positions have one axis.
    """

    routing: Routing | None = None
    shared: bool = False
    norms: Norms = field(default_factory=Norms)
    attention: Mapping[str, Any] = field(default_factory=dict)
    rotation: Mapping[str, Any] = field(default_factory=dict)
    axes: bool | None = None


@dataclass(frozen=True)
class GgufWriter:
    """Describes how models are written as GGUF. `to_gguf.form` writes them.

    Attributes:
        more: more(spec, where) returns further metadata. It raises ArchitectureError, which begins with `where`, for a
            model that GGUF cannot describe.
        experts: Names of the optional values of experts that the architecture has. None: no layer has experts.
        rotated: The metadata has the number of rotated dimensions of a head.
        factors: GGUF readers support a factor for each frequency.
        truncate: GGUF readers round the limits of YaRN's blend to whole dimensions.
        windows: The remedy, if the architecture has no windows; it follows "set".
        renormalised: The value of norm_topk_prob that the architecture does not have.
        refused: Why no model has a GGUF form.
    """

    more: Callable[[ModelSpec, str], Mapping[str, Any]] = lambda *_: {}
    experts: tuple[str, ...] | None = None
    rotated: bool = False
    factors: bool = False
    truncate: bool = True
    windows: str = ""
    renormalised: bool | None = None
    refused: str = ""


SAFETENSORS = TensorNames(own_names=True, layers="model.layers")
ROTATIONS = (  # tensors of older conversions with the frequencies of the rotation
    r".*\.rotary_emb\.inv_freq",
    r"rope\.freqs",
    r"blk\.\d+\.attn_rot_embd\.weight",
)


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        from_config: from_config(fields, outer) reads a config.json. `fields` are those of the text part, `outer` those
            of the whole file; both are the same unless the model is multimodal.
        from_gguf: Reads a GGUF header. None if another family reads its GGUF files.
        to_gguf: to_gguf(spec, where) raises ArchitectureError, which begins with `where`, for a model that GGUF cannot
            describe.
        ignored: Patterns of tensors that the forward does not need, because it computes their values.
        gguf_values: gguf_values(spec, weight, values) converts the values of a weight for GGUF. None: unchanged.
        gguf_factors: End of a vector's name -> end of the name of the vector that GGUF multiplies it by.
    """

    from_config: Callable[[Fields, Fields], ModelSpec]
    gguf_names: TensorNames
    to_gguf: GgufWriter | Callable[[ModelSpec, str], GgufForm] = GgufWriter()
    from_gguf: GgufReader | Callable[[GgufHeader], ModelSpec] | None = None
    # In a family of this package, `families.NAMES` has the names.
    name: str = ""
    architectures: tuple[str, ...] = ()  # `architectures` of config.json; the first one is written
    model_types: tuple[str, ...] = ()  # `model_type`, if `architectures` is absent
    gguf: str = ""  # `general.architecture`; default: the name
    safetensors: TensorNames = SAFETENSORS
    keys: ConfigKeys = field(default_factory=ConfigKeys)  # fields of config.json
    ignored: tuple[str, ...] = ROTATIONS
    gguf_values: Callable[[ModelSpec, str, np.ndarray], np.ndarray] | None = None
    gguf_factors: Mapping[str, str] = field(default_factory=dict)

    def gguf_form(self, spec: ModelSpec, where: str) -> GgufForm:
        """The GGUF form of a model. Raises ArchitectureError, which begins with `where`, if there is none."""
        if not isinstance(self.to_gguf, GgufWriter):
            return self.to_gguf(spec, where)
        from ckdist.models import to_gguf

        return to_gguf.form(self.to_gguf, self.gguf, spec, where)


GGUF = TensorNames({
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **in_layers("blk", {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }),
})  # fmt: skip


SIGMOID = Routing(used=8, scores="sigmoid")  # of GGUF files that do not say how experts are chosen


def renamed(stored: str, weights: str) -> dict[str, Target]:
    """Rules for the matrices of a feed-forward. `{}` in both patterns is gate, up or down."""
    return {stored.format(name): weights.format(name) for name in ("gate", "up", "down")}


def numbered(stored: str, weights: str) -> dict[str, Target]:
    """Rules for the matrices of a feed-forward, which are stored as w1, w2 and w3."""
    return {f"{stored}.w{number}": f"{weights}.{part}_proj" for number, part in ((1, "gate"), (3, "up"), (2, "down"))}


def stacked(stored: str) -> dict[str, Target]:
    """Rules for the stacks of a layer's experts, as transformers saves them."""
    return {f"{stored}.gate_up_proj": GATE_UP, f"{stored}.down_proj": DOWN}


GATE, UP, DOWN = (f"mlp.experts.{part}_proj" for part in ("gate", "up", "down"))
GATE_UP = (GATE, UP)
SAFETENSORS_EXPERTS = SAFETENSORS.but_in_layers({"mlp.experts.gate_up_proj": GATE_UP})
EXPERTS = in_layers("blk", {
    "ffn_gate_inp": "mlp.gate", "exp_probs_b": "mlp.gate.e_score_correction", "ffn_gate_up_exps": GATE_UP,
    "ffn_gate_exps": GATE, "ffn_up_exps": UP, "ffn_down_exps": DOWN, "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
})  # fmt: skip
GGUF_EXPERTS = GGUF.but(EXPERTS)
STACKED_EXPERTS = (r".*\.experts\.(gate_up|down)_proj\.weight", "stacked")
SHARED_EXPERTS = renamed("mlp.shared_experts.{}_proj", "mlp.shared_expert.{}_proj")
GROUPED_EXPERTS = (  # GGUF's values for layers with experts after dense ones, and for a choice of experts by groups
    "leading_dense_block_count", "expert_shared_count", "expert_gating_func", "expert_weights_norm",
    "expert_weights_scale", "expert_group_count", "expert_group_used_count",
)  # fmt: skip
INTERLEAVED = (r".+\.self_attn\.[qk]_proj\..+", "interleaved")
# for families that store the norm before the feed-forward under this name
POST_ATTENTION_NORM = in_layers("blk", {"ffn_norm": (), "post_attention_norm": "post_attention_layernorm"})
POST_NORMS: dict[str, Target] = {  # norms before and after each part
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_POST_NORMS = GGUF.but_in_layers(POST_NORMS)
