"""The definition of a family: names in files, reading and writing of a ModelSpec, names of tensors."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckdist.models.config_keys import ConfigKeys
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec

_LAYER = re.compile(
    r"(blk|model\.layers|(?:en|de)coder\.(?:layers?|block)|layers|(?:enc|dec)\.blk)"
    r"\.(0|[1-9]\d{0,3})\.(.+)\.(weight|bias)"
)
_ANY = re.compile(r"(blk|model\.layers)\.(0|[1-9]\d{0,3})\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.(0|[1-9]\d{0,4})\.(.+)")


_STACK = re.compile(r"(.+\.experts\.(?:gate_up_proj|down_proj))(_bias)?")
_CORRECTION = "e_score_correction_bias"


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


@dataclass(frozen=True)
class TensorNames:
    """The names and forms of a family's weights in files of one format. Elsewhere weights have Hugging Face's names.

    `top` and `layer` map a stored name, without ".weight" or ".bias", to the name of the weight, or to several names if
    the tensor stacks the rows of several weights. If `own_names` (safetensors), a name in neither table is unchanged.
    """

    top: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    prefix: str = "model.layers"  # before a layer's number
    other_prefix: str = ""  # the prefix in files of another writer
    own_names: bool = True
    interleaved: tuple[str, ...] = ()  # parts whose heads are stored for interleaved rotation
    norm_less_one: bool = False  # the weight of a norm is stored + 1,
    plain_norms: tuple[str, ...] = ()  # except for these parts
    joined: tuple[str, ...] = ()  # stored parts with rows of several weights, grouped by head
    exact: Mapping[str, str] = field(default_factory=dict)  # like `layer`, with ".weight" or ".bias"
    minus_exp: tuple[str, ...] = ()  # weights that are stored as -exp(weight)
    by_head: tuple[str, ...] = ()  # parts that are stored as a stack with one matrix per head
    next_layer: Mapping[str, str] = field(default_factory=dict)  # like `layer`, for weights of the next layer
    outer: str = ""  # optional prefix of all names, if the model is a part of the file
    alternating: tuple[str, ...] = ()  # stored parts in which the rows of several weights alternate
    transposed: tuple[str, ...] = ()  # stored stacks whose matrices, if they are floats, have inputs as rows
    whole: Mapping[str, str] = field(default_factory=dict)  # whole stored names of weights that belong to no layer
    encoder: "TensorNames | None" = None  # names of the encoder's tensors; it maps them to names with the root `model`
    kv_b: str = ""  # part whose tensor has, for each head, the rows that make its keys, then those of its values

    def weights_of(self, stored: str) -> tuple[str, ...]:
        """The weights in a stored tensor; empty if the forward does not read it."""
        if self.encoder is not None and (found := self.encoder.weights_of(stored)):
            return tuple(f"encoder.{weight.removeprefix('model.')}" for weight in found)
        name = _text_part(stored) if self.own_names else stored.removeprefix(self.outer)
        match = _LAYER.fullmatch(name)
        whole = _ANY.fullmatch(name)
        if whole and whole[1] == self.prefix and whole[3] in self.exact:
            return (f"model.layers.{whole[2]}.{self.exact[whole[3]]}",)
        if match and match[1] in (self.prefix, self.other_prefix):
            parts = self.layer.get(match[3])
            if parts is not None:
                return tuple(f"model.layers.{match[2]}.{part}.{match[4]}" for part in _several(parts))
            if match[3] in self.next_layer:
                return (f"model.layers.{int(match[2]) + 1}.{self.next_layer[match[3]]}.{match[4]}",)
        elif name in self.whole:
            return (self.whole[name],)
        elif not self.own_names:
            stem, _, kind = name.rpartition(".")
            return (f"{self.top[stem]}.{kind}",) if stem in self.top else ()
        return (name,) if self.own_names else ()

    def stored(self, weights: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Stored name -> its weights, in the order of `weights`. The inverse of `weights_of`."""
        by_part = {part: (name, _several(parts)) for name, parts in self.layer.items() for part in _several(parts)}
        tops, found = {weight: name for name, weight in self.top.items()}, {}
        ends = {part: name for name, part in self.exact.items()}
        for weight in weights:
            stem, _, kind = weight.rpartition(".")
            match, whole = _LAYER.fullmatch(weight), _ANY.fullmatch(weight)
            if whole and whole[3] in ends:
                found[f"{self.prefix}.{whole[2]}.{ends[whole[3]]}"] = (weight,)
            elif match and match[3] in by_part:
                name, parts = by_part[match[3]]
                found[f"{self.prefix}.{match[2]}.{name}.{kind}"] = tuple(
                    f"model.layers.{match[2]}.{part}.{kind}" for part in parts
                )
            else:
                found[f"{tops.get(stem, stem)}.{kind}"] = (weight,)
        return {_with_correction(name): of for name, of in found.items()}

    def stored_matrix(self, weight: str, index: int) -> str:
        """The stored name of one matrix of a stack, if each has its own tensor. The inverse of `stack_of`."""
        match = _LAYER.fullmatch(weight)
        assert match  # only layers have stacks
        alone = {part: name for name, part in self.layer.items() if isinstance(part, str)}
        experts, _, part = alone.get(match[3], match[3]).rpartition(".")
        return f"{self.prefix}.{match[2]}.{experts}.{index}.{part}.{match[4]}"

    def is_kv_b(self, stored: str) -> bool:
        """Whether a stored tensor has, for each head, the rows of its keys, then those of its values."""
        return bool(self.kv_b) and stored.endswith(f".{self.kv_b}.weight")

    def is_by_head(self, weight: str) -> bool:
        """Whether a weight is stored as a stack with one matrix per head."""
        return any(weight.endswith(f".{part}.weight") for part in self.by_head)

    def is_interleaved(self, weight: str) -> bool:
        """Whether the rows of each head of a weight are stored interleaved."""
        return weight.rpartition(".")[0].endswith(self.interleaved) if self.interleaved else False

    def adds_one(self, weight: str) -> bool:
        """Whether weight = stored + 1."""
        plain = weight.rpartition(".")[0].endswith(self.plain_norms) if self.plain_norms else False
        return self.norm_less_one and weight.endswith("norm.weight") and not plain

    def is_joined(self, stored: str) -> bool:
        """Whether a stored tensor groups the rows of its weights by head."""
        return stored.rpartition(".")[0].endswith(self.joined) if self.joined else False

    def is_alternating(self, stored: str) -> bool:
        """Whether the rows of several weights alternate in a stored tensor."""
        return stored.rpartition(".")[0].endswith(self.alternating) if self.alternating else False

    def is_transposed(self, stored: str) -> bool:
        """Whether the matrices of a stored tensor, if it is in floats, are transposed."""
        return stored.endswith(tuple(f"{part}.weight" for part in self.transposed)) if self.transposed else False

    def is_minus_exp(self, weight: str) -> bool:
        """Whether weight = log(-stored)."""
        return weight.endswith(self.minus_exp) if self.minus_exp else False


def _several(parts: str | tuple[str, ...]) -> tuple[str, ...]:
    """A name or a tuple of names, as a tuple."""
    return (parts,) if isinstance(parts, str) else parts


def _text_part(name: str) -> str:
    """Removes the part of a tensor's name that marks the text part of a multimodal model."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF model, for a family's `from_gguf`."""

    fields: Fields  # names without the prefix of the architecture
    dims: Mapping[str, tuple[int, ...]]  # dims of each tensor, the contiguous one first
    vector: Callable[[str], np.ndarray | None]  # name -> contents of a small float32 tensor, None if absent
    family: str  # name of the family that reads the architecture

    @property
    def where(self) -> str:
        """The name of the file for messages."""
        return self.fields.where


@dataclass(frozen=True)
class GgufForm:
    """A ModelSpec in GGUF's form: metadata, and small float32 tensors by name."""

    metadata: Mapping[str, Any]
    vectors: Mapping[str, np.ndarray] = field(default_factory=dict)


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
    """

    name: str
    architectures: tuple[str, ...]  # `architectures` of config.json; the first one is written
    model_types: tuple[str, ...]  # `model_type`, if `architectures` is absent
    gguf: str  # `general.architecture`
    from_config: Callable[[Fields, Fields], ModelSpec]
    from_gguf: Callable[[GgufHeader], ModelSpec] | None
    to_gguf: Callable[[ModelSpec, str], GgufForm]
    safetensors: TensorNames
    gguf_names: TensorNames
    keys: ConfigKeys = field(default_factory=ConfigKeys)  # fields of config.json
    ignored: tuple[str, ...] = ()
    gguf_values: Callable[[ModelSpec, str, np.ndarray], np.ndarray] | None = None


SAFETENSORS = TensorNames()
GGUF = TensorNames(
    top={"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    layer={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    prefix="blk",
    own_names=False,
)
_GATE, _UP, _DOWN = (f"mlp.experts.{part}_proj" for part in ("gate", "up", "down"))
SAFETENSORS_EXPERTS = replace(SAFETENSORS, layer={"mlp.experts.gate_up_proj": (_GATE, _UP)})
GGUF_EXPERTS = replace(
    GGUF,
    layer={
        **GGUF.layer,
        "ffn_gate_inp": "mlp.gate",
        "exp_probs_b": "mlp.gate.e_score_correction",
        "ffn_gate_exps": _GATE,
        "ffn_up_exps": _UP,
        "ffn_down_exps": _DOWN,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
)
QK = ("q_proj", "k_proj")
ROTATIONS = (  # tensors of older conversions with the frequencies of the rotation
    r".*\.rotary_emb\.inv_freq",
    r"rope\.freqs",
    r"blk\.\d+\.attn_rot_embd\.weight",
)
GGUF_POST_NORMS = replace(  # norms before and after each part
    GGUF,
    layer={
        **GGUF.layer,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
