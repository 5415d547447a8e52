"""The description of a decoder or an encoder, read from `config.json` or GGUF metadata, for the forward and planner.

A model is a tuple of layers, each with its own description. It does not depend on files or on sharding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.program.query_scale import QueryScale
from ckdist.program.routing import Routing

if TYPE_CHECKING:
    from ckdist.models.blocks.scorer import Scorer
    from ckdist.models.compressed_fields import CompressedAttention
    from ckdist.models.gated_fields import GatedStreams
    from ckdist.models.indexers import BlockIndexer, Indexer, MeanIndexer
    from ckdist.models.residual_streams import AltUp, BlockResiduals, HyperConnections
    from ckdist.models.state_mixers import AttentionAndMamba, GatedConv, GatedDeltaNet, Mamba1, Mamba2

# Tokens of a step, and mean rows of an expert in it. With fewer, reading and unpacking an expert's weights takes a
# large part of the time.
LEAST_UBATCH, EXPERT_ROWS = 512, 128


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864). It rotates the first `dims` dimensions of a head.

    Attributes:
        inverse_frequencies: float32 (dims / 2,), with the scaling applied.
        magnitude: Factor on cos and sin.
        interleaved: Rotate pairs (2 i, 2 i + 1). Else pairs (i, i + dims / 2), as in Hugging Face's Llama.
        axes: For each pair the axis of a position that rotates it: 0 time, 1 height, 2 width. Empty: positions have
            one axis. Wang et al. 2024, arXiv:2409.12191, section 2.1 (M-RoPE).
        long: The rotation for contexts of more than `original_context` tokens (longrope).
        theta: From the file, for export.
        scaling: From the file, for export.
    """

    inverse_frequencies: np.ndarray = field(compare=False)
    magnitude: float = 1.0
    interleaved: bool = False
    axes: tuple[int, ...] = field(default=(), compare=False)
    long: "RopeSpec | None" = None
    original_context: int = 0
    theta: float = field(default=1e4, compare=False)
    scaling: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def dims(self) -> int:
        """The rotated dimensions of a head."""
        return 2 * len(self.inverse_frequencies)

    def at_context(self, context_length: int) -> "RopeSpec":
        """The rotation for contexts of `context_length` tokens."""
        return self if self.long is None or context_length <= self.original_context else self.long


Ropes: TypeAlias = Mapping[str, RopeSpec]  # rotations by the names that layers use


@dataclass(frozen=True)
class RelativeBias:
    """A learned bias on scores, for each head and bucket of distances between query and key.

    Raffel et al. 2020, arXiv:1910.10683, section 2.1. Half of the buckets have one distance each, the others are
    logarithmic up to `distance`. All layers use the weights of the first layer.
    """

    buckets: int
    distance: int


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention.

    Attributes:
        rope: Name of one of the model's rotations. None: no rotation.
        window: Positions that a token attends to. 0: all.
        chunk: Tokens of a chunk; a token attends only to its own chunk. 0: no chunks.
        qk_norm: "head": norm each head of queries and keys. "unit": the same without weights. "row": norm all heads of
            a token together. "": no norm.
        norms_rotated: The norm of each head comes after its rotation.
        gated: The function of a gate that multiplies the output of each head; "": no gate.
        head_gates: A head has one gate. Else one for each element.
        sinks: Each head has a learned score that adds to the sum of its softmax and has no value.
        bidirectional: A token also attends to later tokens. A window then extends equally to both sides.
        relative: A bias on scores by distance.
        query_scale: A factor on queries by their position.
        output_scale: Factor on the output.
        value_norm: Norm each head of values, without weights.
        keys_as_values: Values are the keys before their norm and rotation.
        source: Number of the layer whose keys and values it reads. None: its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    scale: float  # factor on q.k, usually head_dim ** -0.5
    value_dim: int = 0  # of values; 0: head_dim
    rope: str | None = "global"
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0  # on scores; 0: none
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = ""
    norms_rotated: bool = False
    gated: str = ""
    head_gates: bool = False
    sinks: bool = False
    bidirectional: bool = False
    relative: RelativeBias | None = None
    query_scale: QueryScale | None = None
    output_scale: float = 1.0
    value_norm: bool = False
    keys_as_values: bool = False
    source: int | None = None
    indexer: "BlockIndexer | MeanIndexer | None" = None  # a token sees the positions that this chooses

    @property
    def value_width(self) -> int:
        """Elements of a value per head."""
        return self.value_dim or self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    The cache has, for each token, a latent vector, from which each head makes its keys and values, and a rotated key
    that all heads share.
    """

    num_heads: int
    kv_lora_rank: int
    nope_dim: int  # elements of a head's query and key that are not rotated
    rope_dim: int  # elements of a head's query and of the shared key that are rotated
    v_dim: int
    scale: float  # factor on q.k, including YaRN's magnitude
    q_lora_rank: int = 0  # low rank of queries; 0: one matrix makes them
    rope: str | None = "global"
    norm_eps: float = 0.0  # epsilon of the norms of both low ranks; 0: the model's
    query_scale: QueryScale | None = None
    window: int = 0  # as in Attention
    key_norm: bool = False  # norm the shared key before its rotation
    indexer: "Indexer | None" = None  # a token sees the positions that this chooses
    shares_positions: bool = False  # a token sees those of the last layer with an indexer
    gated: bool = False  # the output of each head is multiplied by the sigmoid of a gate
    element_gates: bool = False  # a gate for each element of a head's output, in place of one for the head
    sinks: bool = False  # as in Attention

    @property
    def head_dim(self) -> int:
        """Elements of a query per head."""
        return self.nope_dim + self.rope_dim

    @property
    def key_width(self) -> int:
        """Cached elements per token."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class DenseFfn:
    """Feed-forward: down(activation(gate x) * up x), or down(activation(up x)) if not `gated`."""

    intermediate_size: int
    activation: str = "silu"  # silu, gelu, gelu_tanh, clamped_swiglu, clamped_silu, relu2
    bias: bool = False
    gated: bool = True
    gate_scale: float = 1.0  # factor on gate x
    scale: float = 1.0  # factor on the result
    limit: float = 0.0  # of f(gate x) and |up x|; 0: none
    deviations: float | None = None  # gate x is max(gate x - mean - deviations * std, 0)


@dataclass(frozen=True)
class MoeFfn:
    """Mixture of experts. Each expert is a feed-forward; a token uses `routing.used` of them."""

    num_experts: int
    intermediate_size: int  # of one expert
    routing: Routing
    activation: str = "silu"
    correction_bias: bool = False  # a bias that only affects the selection of experts
    shared_size: int = 0  # intermediate size of the shared expert, which all tokens use; 0: none
    shared_gate: bool = False  # multiply the output of the shared expert by sigmoid(w x)
    bias: bool = False  # of the router and of the routed experts
    gated: bool = True  # else down(relu(up x)^2)
    shares_input: bool = False  # shares multiply the inputs of routed experts in place of their outputs
    limits: tuple[float, ...] = ()  # `DenseFfn.limit` of routed experts, and of the shared expert; empty: none
    shared_activation: str = ""  # of the shared expert; "": that of the others
    share_factors: bool = False  # each expert has a learned factor of its share
    hashed: int = 0  # rows of a table with the experts of each token id; 0: the best by score
    dense_size: int = 0  # intermediate size of a dense feed-forward that is added, each with its own norms; 0: none
    scale: float = 1.0  # factor on the result
    latent: int = 0  # routed experts read and make this many elements, which matrices make of hidden ones; 0: hidden
    latent_norm: bool = False  # with `latent`: their sum is normed


Ffn: TypeAlias = DenseFfn | MoeFfn


@dataclass(frozen=True)
class Norms:
    """The norms of a layer by their Hugging Face names; None: no norm.

    Norms before a part apply to its input, norms after a part to its output, before it is added to the residual stream.
    """

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    before_ffn: str | None = "post_attention_layernorm"
    after_ffn: str | None = None
    after_eps: float = 0.0  # of the norms after a part; 0: the model's
    # (mixer, ffn): the normed input replaces the residual stream. So post-norm models work: their norm after a part is
    # the norm before the next part.
    replaces_stream: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class CrossAttention:
    """Attention of a decoder to the encoder's output: x + cross(norm(x)), after the mixer.

    Keys and values are made from the encoder's last hidden states, once for each sequence, and cached.
    """

    attention: Attention
    norm: str = "cross_attention_layernorm"
    replaces_stream: bool = False  # as in `Norms`, for the norm before this part


Kind = TypeVar("Kind")
StateMixer: TypeAlias = "GatedDeltaNet | GatedConv | Mamba1 | Mamba2"
Mixer: TypeAlias = "Attention | LatentAttention | StateMixer | AttentionAndMamba | CompressedAttention"


@dataclass(frozen=True)
class LayerSpec:
    """One layer: x + r mixer(norm(x)), then `cross` if there is one, then x + r ffn(norm(x)); r = `residual_scale`.

    A mixer or a feed-forward that is None is left out, with its norms.
    """

    mixer: "Mixer | None"
    ffn: Ffn | None
    norms: Norms = Norms()
    residual_scale: float = 1.0
    cross: CrossAttention | None = None
    parallel: bool = False  # mixer and feed-forward read the same norm, `before_mixer`
    scalar: bool = False  # the output of the layer is multiplied by a learned number

    @property
    def attention(self) -> Attention:
        """The mixer, if it is attention. Raises ArchitectureError for another mixer."""
        if not isinstance(self.mixer, Attention):
            raise ArchitectureError(f"a layer has {type(self.mixer).__name__} where attention is expected")
        return self.mixer


@dataclass(frozen=True)
class LayerInputs:
    """Per-layer embeddings: x + norm(projection(f(gate x) * input)) at the end of each layer.

    A layer's input is (norm(projection of the token's embedding) + the token's row of a table) / sqrt(2). The table is
    read by rows from its file.
    """

    width: int  # of a layer's input
    rows: int  # of the table; tokens beyond have its first row
    activation: str = "gelu_tanh"


@dataclass(frozen=True)
class ModelSpec:
    """One transformer, or a decoder with its `encoder`. Weights have Hugging Face names."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    ropes: Ropes
    norm_eps: float
    max_position: int
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    embedding_eps: float = 0.0  # embeddings are normed, without weights, with this epsilon; 0: they are not
    logit_scale: float = 1.0  # factor on the last hidden states, before the output projection
    logit_soft_cap: float = 0.0  # 0: none
    norm: str = "rms"  # rms, unit (rms without weights), layer (layer norm without bias), layer_bias
    positions: int = 0  # rows of learned position embeddings; 0: none
    first_position: int = 0  # row of the first position
    token_types: int = 0  # rows of a table for the first and the second text of a pair; 0: none
    waves: str = ""  # rotation for sinusoidal position embeddings, [sines, cosines]; "": none
    scorer: "Scorer | None" = None  # head of a cross-encoder, in place of all other outputs
    root: str = "model"  # prefix of weight names
    encoder: "ModelSpec | None" = None  # reads the prompt; it shares the token embeddings
    start_tokens: tuple[int, ...] = ()  # decoding begins with these if there is an encoder
    banned_tokens: tuple[int, ...] = ()  # never sampled
    output_bias: bool = False  # the output projection has a bias
    layer_inputs: LayerInputs | None = None
    altup: "AltUp | None" = None
    streams: "HyperConnections | GatedStreams | None" = None
    block_residuals: "BlockResiduals | None" = None
    projections: tuple[int, ...] = ()  # widths of dense layers after the last norm, which make embeddings
    predicts: bool = False  # a layer that predicts the token after the next one: see predictor.py
    balance_coefficient: float = field(default=0.0, compare=False)  # of the load-balancing loss in training; 0: none

    @property
    def generates(self) -> bool:
        """True if it predicts the next token: no layer is bidirectional."""
        return not any(mixer.bidirectional for mixer in self.mixers(Attention))

    @property
    def reads_whole(self) -> bool:
        """True if a prompt must be computed in one step, because its tokens attend to later ones."""
        return self.encoder is not None or not self.generates

    @property
    def usual_ubatch(self) -> int:
        """Most tokens of a step, unless --ubatch-size is given: LEAST_UBATCH, or EXPERT_ROWS rows for each expert.

        The rows of such steps take about a hundredth of the memory of the experts.
        """
        return max([LEAST_UBATCH, *(EXPERT_ROWS * ffn.num_experts // ffn.routing.used for ffn in self.mixtures())])

    @property
    def shares_values(self) -> bool:
        """True if layers read more than one value of earlier ones: caches, inputs made before the first, streams."""
        return (
            self.layer_inputs is not None
            or self.streams is not None
            or self.block_residuals is not None
            or any(mixer.source is not None for mixer in self.mixers(Attention))
        )

    @property
    def first_cross_cache(self) -> int:
        """Index of the first layer's cross-attention cache. Lower indices are the layers' own caches.

        Encoder and decoder use the layers' own caches in turn.
        """
        return max(len(self.layers), len(self.encoder.layers) if self.encoder else 0)

    def mixers(self, kind: type[Kind]) -> list[Kind]:
        """The mixers of a kind, in the order of their layers."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, kind)]

    @property
    def kv_heads(self) -> list[int]:
        """The key heads of each layer; 0 in one without attention."""
        return [layer.mixer.num_kv_heads if isinstance(layer.mixer, Attention) else 0 for layer in self.layers]

    def layer_of(self, weight: str) -> LayerSpec:
        """The layer of a weight, whose name begins as model.layers.0."""
        return self.layers[int(weight.split(".")[2])]

    def mixtures(self) -> list[MoeFfn]:
        """The feed-forwards with experts, in the order of their layers."""
        return [layer.ffn for layer in self.layers if isinstance(layer.ffn, MoeFfn)]

    def with_layers(self, **parts: Sequence[Any]) -> "ModelSpec":
        """The model with other parts of layers: a value per layer for each of these fields of LayerSpec."""
        rows = zip(self.layers, *parts.values(), strict=True)
        layers = (replace(layer, **dict(zip(parts, row, strict=True))) for layer, *row in rows)
        return replace(self, layers=tuple(layers))

    def at_context(self, context_length: int) -> "ModelSpec":
        """The model for contexts of `context_length` tokens: its rotations may depend on that."""
        return replace(self, ropes={name: rope.at_context(context_length) for name, rope in self.ropes.items()})
