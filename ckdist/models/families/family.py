"""What a file in this folder says of its family: names in files, numbers to a ModelSpec and back, names of tensors."""

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
    """The name of the stack of which a stored tensor is one matrix, and which; None of one that is whole."""
    match = _EXPERT.fullmatch(stored)
    if match:
        return f"{match[1]}.{match[3]}", int(match[2])
    if stored.endswith(f".{_CORRECTION}"):
        return f"{stored.removesuffix('_bias')}.bias", None
    stack = _STACK.fullmatch(stored)
    return f"{stack[1]}.{'bias' if stack[2] else 'weight'}" if stack else stored, None


def _with_correction(name: str) -> str:
    """A name in which `stack_of` finds the bias of a choice, as files have it."""
    stem = name.removesuffix(".bias")
    return f"{stem}_bias" if name != stem and f"{stem}_bias".endswith(_CORRECTION) else name


@dataclass(frozen=True)
class TensorNames:
    """How files of one format name and store a family's weights, which elsewhere have the names of Hugging Face.

    `top` and `layer` turn a stored name without ".weight" or ".bias" into that of the weight, or into those of weights
    whose rows it stacks. In safetensors what is in neither keeps its name (`own_names`).
    """

    top: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    prefix: str = "model.layers"  # before a layer's number
    other_prefix: str = ""  # the same in files of another writer
    own_names: bool = True
    interleaved: tuple[str, ...] = ()  # parts whose heads are stored for the rotation of neighbours, not of halves
    norm_less_one: bool = False  # norms multiply by one more than what is stored,
    plain_norms: tuple[str, ...] = ()  # but for these parts
    joined: tuple[str, ...] = ()  # stored parts that have of each head the rows of every one of their weights
    exact: Mapping[str, str] = field(default_factory=dict)  # as `layer`, with the end of the name
    minus_exp: tuple[str, ...] = ()  # weights of which minus the exponential is stored
    by_head: tuple[str, ...] = ()  # parts of which a matrix is stored for each head, in a stack
    next_layer: Mapping[str, str] = field(default_factory=dict)  # as `layer`, of weights of the layer behind
    outer: str = ""  # what a name may begin with: the part of the file that is the model
    alternating: tuple[str, ...] = ()  # stored parts whose rows are by turns those of each of their weights
    transposed: tuple[str, ...] = ()  # stored stacks whose matrices have inputs as rows, where they are floats
    whole: Mapping[str, str] = field(default_factory=dict)  # stored names, with their end, of weights of no layer
    encoder: "TensorNames | None" = None  # of the encoder's tensors, where names of weights have `model` for its root
    kv_b: str = ""  # the part whose tensor has of each head the rows that make its keys, and behind them its values

    def weights_of(self, stored: str) -> tuple[str, ...]:
        """The weights in a stored tensor; none where the forward does not read it."""
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
        """Stored name -> the weights that it holds, in the order of `weights`: the way back of `weights_of`."""
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
        """The stored name of one matrix of a stack, where each has a tensor: the way back of `stack_of`."""
        match = _LAYER.fullmatch(weight)
        assert match  # stacks are in layers
        alone = {part: name for name, part in self.layer.items() if isinstance(part, str)}
        experts, _, part = alone.get(match[3], match[3]).rpartition(".")
        return f"{self.prefix}.{match[2]}.{experts}.{index}.{part}.{match[4]}"

    def is_kv_b(self, stored: str) -> bool:
        """Whether a stored tensor has of each head the rows of its keys and of its values."""
        return bool(self.kv_b) and stored.endswith(f".{self.kv_b}.weight")

    def is_by_head(self, weight: str) -> bool:
        """Whether a weight is stored as a stack of its heads' matrices."""
        return any(weight.endswith(f".{part}.weight") for part in self.by_head)

    def is_interleaved(self, weight: str) -> bool:
        """Whether the rows of a weight's heads are stored interleaved."""
        return weight.rpartition(".")[0].endswith(self.interleaved) if self.interleaved else False

    def adds_one(self, weight: str) -> bool:
        """Whether a weight is one more than what is stored."""
        plain = weight.rpartition(".")[0].endswith(self.plain_norms) if self.plain_norms else False
        return self.norm_less_one and weight.endswith("norm.weight") and not plain

    def is_joined(self, stored: str) -> bool:
        """Whether a stored tensor has of each head the rows of every one of its weights."""
        return stored.rpartition(".")[0].endswith(self.joined) if self.joined else False

    def is_alternating(self, stored: str) -> bool:
        """Whether the rows of a stored tensor are by turns those of each of its weights."""
        return stored.rpartition(".")[0].endswith(self.alternating) if self.alternating else False

    def is_transposed(self, stored: str) -> bool:
        """Whether the rows of a stored tensor of floats are the columns of its weights."""
        return stored.endswith(tuple(f"{part}.weight" for part in self.transposed)) if self.transposed else False

    def is_minus_exp(self, weight: str) -> bool:
        """Whether a weight is the logarithm of minus what is stored."""
        return weight.endswith(self.minus_exp) if self.minus_exp else False


def _several(parts: str | tuple[str, ...]) -> tuple[str, ...]:
    """One name or several, as several."""
    return (parts,) if isinstance(parts, str) else parts


def _text_part(name: str) -> str:
    """The name of a text model's tensor, for a name in a file that may hold a multimodal model."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name


@dataclass(frozen=True)
class GgufHeader:
    """What a family's file reads of a GGUF model: `fields`, without the architecture before their names, `dims` of the
    tensors, the contiguous one first, and the contents of small float32 tensors by `vector(name)`, None where absent.
    `family` is that of the architecture.
    """

    fields: Fields
    dims: Mapping[str, tuple[int, ...]]
    vector: Callable[[str], np.ndarray | None]

    family: str

    @property
    def where(self) -> str:
        """The file, for messages."""
        return self.fields.where


@dataclass(frozen=True)
class GgufForm:
    """A model's numbers as GGUF has them: metadata, and small float32 tensors by name."""

    metadata: Mapping[str, Any]
    vectors: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One family of models.

    `from_config(fields, outer)` reads a config.json, of a multimodal model the language part and the whole.
    `from_gguf`: None where another family reads its GGUF files. `to_gguf(spec, where)` raises ArchitectureError,
    beginning with `where`, for what GGUF's readers cannot be told. `ignored`: patterns of tensors that the forward
    makes for itself.
    """

    name: str
    architectures: tuple[str, ...]  # `architectures` of config.json; the first is written
    model_types: tuple[str, ...]  # `model_type`, where `architectures` is absent
    gguf: str  # `general.architecture`
    from_config: Callable[[Fields, Fields], ModelSpec]
    from_gguf: Callable[[GgufHeader], ModelSpec] | None
    to_gguf: Callable[[ModelSpec, str], GgufForm]
    safetensors: TensorNames
    gguf_names: TensorNames
    keys: ConfigKeys = field(default_factory=ConfigKeys)  # of config.json
    ignored: tuple[str, ...] = ()
    # (spec, weight, its values) -> as GGUF has them, where that is more than another name
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
ROTATIONS = (  # tensors of older conversions that hold what the rotation's numbers say
    r".*\.rotary_emb\.inv_freq",
    r"rope\.freqs",
    r"blk\.\d+\.attn_rot_embd\.weight",
)
GGUF_POST_NORMS = replace(  # a norm after each part as well as before it
    GGUF,
    layer={
        **GGUF.layer,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
