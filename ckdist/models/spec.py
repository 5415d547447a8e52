"""What a decoder or an encoder is, in numbers: read from `config.json` or GGUF metadata, used by forward and planner.

A model is a tuple of layers, each described by itself. It says nothing about where weights lie or how work is sharded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.layout import Dim, Sharding
from ckdist.program.cache import CacheArray, CacheSpec
from ckdist.program.routing import Routing


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

    `inverse_frequencies`: float32 (rotated dimensions / 2,), scaling already applied. The first dimensions of a head
    are rotated, the others are not. Dimension i turns with i + half of the rotated ones, as in Hugging Face's Llama;
    `interleaved`: 2 i with 2 i + 1. `magnitude`: factor on cos and sin, else 1. `long`: what takes its place in
    contexts of more than `original_context` tokens (longrope). `theta` and `scaling`: the file's, for export.
    """

    inverse_frequencies: np.ndarray = field(compare=False)
    magnitude: float = 1.0
    interleaved: bool = False
    long: "RopeSpec | None" = None
    original_context: int = 0
    theta: float = field(default=1e4, compare=False)
    scaling: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def dims(self) -> int:
        """Dimensions of a head that are rotated."""
        return 2 * len(self.inverse_frequencies)

    def at_context(self, context_length: int) -> "RopeSpec":
        """The rotation in contexts of so many tokens."""
        return self if self.long is None or context_length <= self.original_context else self.long


@dataclass(frozen=True)
class RelativeBias:
    """What is added to scores by the distance of query and key: a learned number of each head and bucket of distances.

    Raffel et al. 2020, arXiv:1910.10683, section 2.1: half of the buckets are single distances, the others grow with
    the logarithm up to `distance`. The first layer's weights serve all layers of a stack.
    """

    buckets: int
    distance: int


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention.

    `rope` names one of the model's rotations, None: the layer rotates nothing. `window`: positions that a token sees,
    0: all. `qk_norm`: "head", each head is normed alone; "row", all heads of a token together; "": neither. `gated`:
    what comes out of a head is multiplied by the sigmoid of a gate. `sinks`: each head has a learned score that counts
    in its softmax's sum and has no value. `bidirectional`: a token sees those behind it as well, of a window as many as
    before it. `relative`: a bias of scores.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    scale: float  # on q.k; head_dim ** -0.5 for most
    value_dim: int = 0  # of a value's head; 0: head_dim
    rope: str | None = "global"
    window: int = 0
    soft_cap: float = 0.0  # on scores; 0: none
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = ""
    gated: bool = False
    sinks: bool = False
    bidirectional: bool = False
    relative: RelativeBias | None = None

    @property
    def value_width(self) -> int:
        """Elements of a value's head."""
        return self.value_dim or self.head_dim

    def cache(self, sharding: Sharding) -> CacheSpec:
        """What a layer caches: keys and values of every token."""
        _, keys = sharding.heads(self.num_heads, self.num_kv_heads, self.head_dim)
        values = replace(keys, width=self.value_width)
        return CacheSpec(paged=(CacheArray("k", keys), CacheArray("v", values)))


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention by the gated delta rule. Yang et al. 2024, arXiv:2412.06464.

    A value head has a state of key_dim x value_dim; several may share a key head. Value head i reads key head
    i // (value heads per key head), or, where heads are `tiled`, i % num_key_heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a key head, and of its queries
    value_dim: int  # of a value head
    conv_kernel: int = 4  # tokens that the short convolution sees
    tiled: bool = False

    def heads(self, sharding: Sharding, width: int = 1) -> tuple[Dim, Dim]:
        """The dimensions of value heads and of key heads, of `width` elements each.

        Consecutive tiled value heads read key heads that do not follow one another: every rank then has all of these.
        """
        if not self.tiled or self.num_key_heads == self.num_value_heads:
            return sharding.heads(self.num_value_heads, self.num_key_heads, width)
        return sharding.heads(self.num_value_heads, self.num_value_heads, width)[0], Dim(
            "kv_heads", self.num_key_heads, width
        )

    def cache(self, sharding: Sharding) -> CacheSpec:
        """What a layer caches of every sequence: the states of its value heads, and what convolutions see next."""
        recurrent, _ = self.heads(sharding, self.key_dim * self.value_dim)
        channels = 2 * self.key_dim + self.value_dim
        tail = replace(recurrent, width=(self.conv_kernel - 1) * channels)
        return CacheSpec(state=(CacheArray("recurrent", recurrent), CacheArray("conv", tail)))


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    Of a token a latent vector is cached, of which each head makes its keys and values, and a rotated key that all heads
    share. `q_lora_rank`: of queries, 0: one matrix makes them. `scale` is on q.k, with YaRN's part. `norm_eps`: of the
    norms of both low ranks, 0: the model's.
    """

    num_heads: int
    kv_lora_rank: int
    nope_dim: int  # of a head's query and key, not rotated
    rope_dim: int  # of a head's query and the shared key, rotated
    v_dim: int
    scale: float
    q_lora_rank: int = 0
    rope: str | None = "global"
    norm_eps: float = 0.0

    @property
    def head_dim(self) -> int:
        """Elements of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def key_width(self) -> int:
        """Elements that are cached of a token."""
        return self.kv_lora_rank + self.rope_dim

    def cache(self, sharding: Sharding) -> CacheSpec:
        """What a layer caches: the latent vector and the shared key of every token, on every rank that has a head."""
        _, keys = sharding.heads(self.num_heads, 1, self.key_width)
        return CacheSpec(paged=(CacheArray("latent", keys, self.kv_lora_rank),))


@dataclass(frozen=True)
class DenseFfn:
    """Gated feed-forward: down(activation(gate x) * up x); where it is not `gated`, down(activation(up x))."""

    intermediate_size: int
    activation: str = "silu"  # silu, gelu, gelu_tanh, clamped_swiglu
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True)
class MoeFfn:
    """Mixture of experts, each a gated feed-forward of `intermediate_size`, of which a token takes `routing.used`.

    `correction_bias`: a bias that counts in the choice alone. `shared_size`: intermediate size of the experts that
    every token takes, together, 0: there are none; `shared_gate`: their result is times sigmoid(w x). `bias`: of the
    router and of the chosen experts.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    activation: str = "silu"
    correction_bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Norms:
    """The norms of a layer by their Hugging Face names, None where there is none.

    Before: of what the part reads; `replaces_stream`: what is added to the residual stream is added to that norm
    (post-norm models: their norm behind a part is the one before the next). After: of what a part adds to the stream.
    """

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    before_ffn: str | None = "post_attention_layernorm"
    after_ffn: str | None = None
    replaces_stream: tuple[bool, bool] = (False, False)  # before the mixer, before the ffn


@dataclass(frozen=True)
class CrossAttention:
    """Attention of a decoder's tokens to those that an encoder has read: x + cross(norm(x)), behind the mixer.

    Keys and values are made of the encoder's last hidden states, once for each sequence, and cached. `replaces_stream`:
    as in `Norms`, of the norm before it.
    """

    attention: Attention
    norm: str = "cross_attention_layernorm"
    replaces_stream: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One layer: x + r mixer(norm(x)), then x + r ffn(norm(x)), with r = `residual_scale`; between both, where there is
    one, `cross`.
    """

    mixer: Attention | LatentAttention | GatedDeltaNet
    ffn: DenseFfn | MoeFfn
    norms: Norms = Norms()
    residual_scale: float = 1.0
    cross: CrossAttention | None = None

    def caches(self, sharding: Sharding) -> list[CacheSpec]:
        """What the layer keeps between steps: of its mixer, and of what an encoder has read."""
        mixers = [self.mixer, *([] if self.cross is None else [self.cross.attention])]
        return [mixer.cache(sharding) for mixer in mixers]

    @property
    def attention(self) -> Attention:
        """The mixer of a family that has attention alone. ArchitectureError for another one."""
        if not isinstance(self.mixer, Attention):
            raise ArchitectureError(f"a layer has {type(self.mixer).__name__} where attention is expected")
        return self.mixer


@dataclass(frozen=True)
class Scorer:
    """What makes a score of an encoder's hidden states: out(norm(activation(dense h))) of the first token's, or where
    it `averages` of the mean of all tokens'.

    `norm`: as in ModelSpec, "": there is none. `sigmoid`: a score is the sigmoid of what comes out.
    """

    activation: str = "tanh"  # tanh, gelu, gelu_tanh, silu
    bias: bool = True  # of the dense part; the last one has a bias
    norm: str = ""
    averages: bool = False
    sigmoid: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """One transformer, or a decoder with its `encoder`. Weights carry Hugging Face names.

    `ropes` are the rotations that layers name. `logit_scale` is on logits, before `logit_soft_cap` (0: none). `norm`:
    "rms", "layer" (layer norm), "layer_bias" (with biases). `positions` embeddings of positions are added to those of
    tokens, the first of them that of row `first_position`; `token_types`: rows of a table of which the first is added
    as well, and behind a first text the second. `waves`: the rotation whose sines, and behind these cosines, are the
    embeddings of positions; "": none. `scorer`: a cross-encoder's, which makes no other rows.

    `encoder`: what reads the prompt, with the decoder's embeddings of tokens and weights whose names begin with its
    `root`; decoding begins with `start_tokens`. `banned_tokens` are never drawn. `output_bias`: the output projection
    has one.
    `balance_coefficient`: of the load-balancing loss of experts in training, 0: there is none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    ropes: Mapping[str, RopeSpec]
    norm_eps: float
    max_position: int
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    norm: str = "rms"
    positions: int = 0  # rows of the table; 0: there is none
    first_position: int = 0
    token_types: int = 0
    waves: str = ""
    scorer: Scorer | None = None
    root: str = "model"
    encoder: "ModelSpec | None" = None
    start_tokens: tuple[int, ...] = ()
    banned_tokens: tuple[int, ...] = ()
    output_bias: bool = False
    balance_coefficient: float = field(default=0.0, compare=False)

    @property
    def generates(self) -> bool:
        """Whether it predicts the next token: no layer sees those behind one."""
        return not any(isinstance(layer.mixer, Attention) and layer.mixer.bidirectional for layer in self.layers)

    @property
    def reads_whole(self) -> bool:
        """Whether a prompt is computed in one step, since its tokens see those behind them."""
        return self.encoder is not None or not self.generates

    @property
    def first_cross_cache(self) -> int:
        """The number of the first layer's cache of cross-attention; those before it are of layers, and serve encoder
        and decoder by turns.
        """
        return max(len(self.layers), len(self.encoder.layers) if self.encoder else 0)

    def at_context(self, context_length: int) -> "ModelSpec":
        """The model in contexts of so many tokens: its rotations may depend on that."""
        return replace(self, ropes={name: rope.at_context(context_length) for name, rope in self.ropes.items()})
