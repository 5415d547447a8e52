"""The header of a GGUF file, metadata and tensor shapes, and readers of the parts that most families share.

It reads no file. A file in `families` calls the readers for its family.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.models import limits, rope
from ckdist.models.families.family import GgufReader
from ckdist.models.fields import Fields
from ckdist.models.from_config import Sizes, after_dense
from ckdist.models.spec import Attention, DenseFfn, Ffn, LayerSpec, ModelSpec, MoeFfn, Ropes, RopeSpec
from ckdist.program.routing import Routing

GATING = {"softmax": 1, "sigmoid": 2, "sqrt_softplus": 4}  # expert_gating_func; 0: the default of the architecture


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF model, for a family's `from_gguf`.

    Attributes:
        fields: Names without the prefix of the architecture.
        dims: Dims of each tensor, the contiguous one first.
        vector: Name -> contents of a small float32 tensor, None if absent.
    """

    fields: Fields
    dims: Mapping[str, tuple[int, ...]]
    vector: Callable[[str], np.ndarray | None]

    def but(self, values: Mapping[str, Any]) -> "GgufHeader":
        """The header with other values of fields."""
        return replace(self, fields=self.fields.but(values))

    def uniform(self, reader: GgufReader) -> ModelSpec:
        """Reads a model with identical layers."""
        n = self.sizes()
        ffn = self.experts(reader.routing, reader.shared) if reader.routing else self.dense()
        layer = LayerSpec(replace(self.attention(n), **reader.attention), ffn, reader.norms)
        global_rope = self.rotation(n, **reader.rotation)
        if reader.axes is not None:
            global_rope = self.three_axes(global_rope, reader.axes)
        return self.model(n, [layer] * n.num_layers, {"global": global_rope})

    def sizes(self, epsilon: str = "attention.layer_norm_rms_epsilon") -> Sizes:
        """Reads the sizes of a model with identical layers, without layers that predict further tokens.

        `epsilon` is the name of its field. Raises ModelFileError.
        """
        f = self.fields
        num_layers = f.integer("block_count", high=limits.MAX_LAYERS)
        num_layers -= f.integer("nextn_predict_layers", 0, low=0, high=num_layers - 1)
        hidden_size = f.integer("embedding_length", high=limits.MAX_WIDTH)
        num_heads = self.per_layer("attention.head_count", limits.MAX_HEADS)
        kv_heads = "attention.head_count_kv"
        embedding = self.dims.get("token_embd.weight")
        if embedding is None or len(embedding) != 2 or embedding[1] > limits.MAX_VOCAB:
            allowed = f"2 dimensions and at most {limits.MAX_VOCAB} rows"
            raise ModelFileError(f"{f.where}: token_embd.weight must be there with {allowed}; it has {embedding}")
        return Sizes(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=self.per_layer(kv_heads, limits.MAX_HEADS) if f.has(kv_heads) else num_heads,
            head_dim=self.head_dim(hidden_size, num_heads),
            vocab_size=embedding[1],
            max_position=f.integer("context_length", high=limits.MAX_POSITION),
            norm_eps=f.number(epsilon, high=1.0),
        )

    def per_layer(self, name: str, high: int) -> int:
        """Reads a number that may be an array with one per layer: 0 in layers without it, else the same in all.

        Raises ModelFileError if layers differ.
        """
        f = self.fields
        value = f.raw(name)
        if isinstance(value, np.ndarray):
            value = value[value != 0]
            if value.size == 0 or (value != value[0]).any():
                raise f.error(name, np.unique(value)[:8].tolist(), "the same in every layer")
            f = f.but({name: value[0].item()})
        return f.integer(name, high=high)

    def layers_with(self, name: str, num_layers: int) -> list[bool]:
        """True for each layer with more than 0 of a number that may be an array with one per layer."""
        f = self.fields
        value = f.raw(name)
        if not isinstance(value, np.ndarray):
            return [True] * num_layers
        if len(value) != num_layers or value.dtype.kind not in "iu":
            raise f.error(name, f"{len(value)} values", f"one whole number for each of {num_layers} layers")
        return (value > 0).tolist()

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        """Reads the elements of a head. Raises ModelFileError if keys and values differ."""
        f = self.fields
        if not f.has("attention.key_length") and hidden_size % num_heads:
            allowed = f"divisible by the {num_heads} heads, or attention.key_length must be given"
            raise f.error("embedding_length", hidden_size, allowed)
        size = f.integer("attention.key_length", hidden_size // num_heads, high=limits.MAX_HEAD_DIM)
        values = f.integer("attention.value_length", size, high=limits.MAX_HEAD_DIM)
        if values != size:
            raise f.error("attention.value_length", values, f"the same as the heads' size, {size}")
        return size

    def ffn_size(self) -> int:
        """Reads the intermediate size of a layer's feed-forward."""
        return self.per_layer("feed_forward_length", limits.MAX_FFN)

    def dense(self, activation: str = "silu") -> DenseFfn:
        """The gated feed-forward of a layer. It has biases if there are tensors for them."""
        return DenseFfn(self.ffn_size(), activation, self.has("ffn_gate.bias"))

    def feed_forwards(self, n: Sizes, experts: MoeFfn, usual: int = 0, activation: str = "silu") -> list[Ffn]:
        """The feed-forward of each layer: first dense ones, then experts. `usual`: dense ones by default."""
        count = self.fields.integer("leading_dense_block_count", usual, low=0, high=limits.MAX_LAYERS)
        return after_dense(lambda: self.dense(activation), experts, count, n.num_layers)

    def rows(self, name: str) -> int:
        """Rows of a table in a GGUF file; 0 if the table is absent."""
        dims = self.dims.get(f"{name}.weight", ())
        return dims[1] if len(dims) > 1 else len(dims)

    def has(self, name: str) -> bool:
        """True if the first layer has a tensor of this name."""
        return f"blk.0.{name}" in self.dims

    def has_any(self, end: str) -> bool:
        """True if the name of a tensor ends with `end`."""
        return any(name.endswith(end) for name in self.dims)

    def model(self, n: Sizes, layers: Sequence[LayerSpec], ropes: Ropes | None = None, /, **more: Any) -> ModelSpec:
        """A model of these layers. `ropes`: default: `rotation` alone. `more` are further fields of ModelSpec."""
        return n.model(layers, {"global": self.rotation(n)} if ropes is None else ropes, self.tied(), **more)

    def tied(self) -> bool:
        """True if the output projection is tied to the embeddings."""
        return "output.weight" not in self.dims

    def attention(self, n: Sizes) -> Attention:
        """The attention of a layer without a window. It has biases and norms if there are tensors for them."""
        return n.attention(
            self.fields.number("attention.scale", n.head_dim**-0.5),
            qkv_bias=self.has("attn_q.bias"),
            o_bias=self.has("attn_output.bias"),
            qk_norm="head" if self.has("attn_q_norm.weight") else "",
        )

    def is_mixture(self) -> bool:
        """True if layers have experts."""
        return self.fields.integer("expert_count", 0, low=0, high=limits.MAX_EXPERTS) > 0

    def experts(self, routing: Routing, shared: bool = False) -> MoeFfn:
        """The experts of a layer. They have correction biases and shared gates if there are tensors for them.

        `routing` has the defaults of all fields except `used`. `shared`: there is a shared expert.
        """
        f = self.fields
        scores = f.integer("expert_gating_func", GATING[routing.scores], low=0, high=1 << 10)
        if scores not in (0, *GATING.values()):
            known = " or ".join(f"{number} ({name})" for name, number in GATING.items())
            raise f.error("expert_gating_func", scores, known)
        size = f.integer("expert_feed_forward_length", self._size("ffn_gate_exps"), high=limits.MAX_FFN)
        routing = replace(
            routing,
            used=f.integer("expert_used_count", high=limits.MAX_EXPERTS),
            scores=next((name for name, number in GATING.items() if number == scores), routing.scores),
            renormalise=f.flag("expert_weights_norm", routing.renormalise),
            scale=f.number("expert_weights_scale", 0.0, low=-1.0, high=1e6) or 1.0,
            groups=f.integer("expert_group_count", 1, low=0, high=limits.MAX_EXPERTS) or 1,
            top_groups=f.integer("expert_group_used_count", 1, low=0, high=limits.MAX_EXPERTS) or 1,
        )
        return MoeFfn(
            f.integer("expert_count", high=limits.MAX_EXPERTS),
            size,
            routing,
            correction_bias=self.has_any(".exp_probs_b.bias") or self.has_any(".exp_probs_b"),
            shared_size=self._size("ffn_gate_shexp") if shared else 0,
            shared_gate=shared and self.has_any(".ffn_gate_inp_shexp.weight"),
        )

    def _size(self, part: str) -> int:
        """Rows of a matrix in the first layer that has it; 0 if none has."""
        of = re.compile(rf"blk\.\d+\.{part}\.weight")
        return next((dims[1] for name, dims in self.dims.items() if of.fullmatch(name) and len(dims) > 1), 0)

    def sliding_layers(self, num_layers: int, period: int) -> list[bool]:
        """True for each layer that slides: by the file's pattern, or all but the last of a period. Period 0: all."""
        f, name = self.fields, "attention.sliding_window_pattern"
        pattern = f.raw(name)
        if isinstance(pattern, np.ndarray):
            # layers that predict further tokens have flags too
            if pattern.dtype != bool or len(pattern) not in (num_layers, f.integer("block_count", num_layers)):
                raise f.error(name, f"{len(pattern)} values", f"one flag for each of {num_layers} layers")
            return pattern[:num_layers].tolist()
        period = f.integer(name, period, low=0)
        return [period == 0 or (i + 1) % period != 0 for i in range(num_layers)]

    def windows(self, num_layers: int, period: int) -> tuple[int, list[bool]]:
        """(the window or 0, `sliding_layers`). Without a window, no layer slides."""
        window = self.fields.integer("attention.sliding_window", 0, low=0, high=limits.MAX_POSITION)
        return window, self.sliding_layers(num_layers, period) if window else [False] * num_layers

    def rotation(
        self,
        n: Sizes,
        theta: float = 1e4,
        *,
        partial: bool = False,
        interleaved: bool = False,
        longrope: bool = False,
        truncate: bool = True,
    ) -> RopeSpec:
        """Reads the rotation of full layers.

        - `partial`: a part of each head may be rotated.
        - `longrope`: there may be factors for short and for long contexts.
        - `truncate`: YaRN rounds the limits of its blend to whole dimensions.
        """
        f = self.fields
        theta = f.number("rope.freq_base", theta, low=1.0)
        dims = f.integer("rope.dimension_count", n.head_dim, high=limits.MAX_HEAD_DIM)
        if dims != n.head_dim and not (partial and dims < n.head_dim and dims % 2 == 0):
            raise f.error("rope.dimension_count", dims, f"the same as the heads' size, {n.head_dim}")
        magnitude = f.number("rope.scaling.attn_factor", 1.0, high=1e3)
        original = f.integer("rope.scaling.original_context_length", n.max_position, high=limits.MAX_POSITION)
        frequencies = rope.plain(dims, theta)
        if longrope and self.dims.keys() & {"rope_factors_short.weight", "rope_factors_long.weight"}:
            of = lambda each: RopeSpec((frequencies / each).astype(np.float32), magnitude, interleaved, theta=theta)
            short, long = (self.factors(f"rope_factors_{length}.weight", frequencies) for length in ("short", "long"))
            if short is None or long is None:
                raise ModelFileError(
                    f"{f.where} has rope_factors_short.weight or rope_factors_long.weight; it needs both"
                )
            return replace(of(short), long=of(long), original_context=original)
        kind = f.text("rope.scaling.type", "linear")
        factor = f.number(
            "rope.scaling.factor", f.number("rope.scale_linear", 1.0, low=1e-6, high=1e6), low=1e-6, high=1e6
        )
        if kind == "linear":
            frequencies = frequencies / factor
        elif kind == "yarn":
            from ckdist.models import rope_scaling  # many models have none

            fast, slow = f.number("rope.scaling.yarn_beta_fast", 32.0), f.number("rope.scaling.yarn_beta_slow", 1.0)
            frequencies = rope_scaling.yarn(frequencies, theta, factor, original, fast, slow, truncate)
            # Two names: `yarn_attn_factor` is `attention_factor` of a config.json, the whole magnitude unless there is
            # also `attn_factor`, which multiplies it.
            magnitude *= f.number("rope.scaling.yarn_attn_factor", rope_scaling.yarn_magnitude(factor), high=1e3)
            if (blend := f.number("rope.scaling.yarn_ext_factor", 1.0, low=-2.0)) >= 0.0 and blend != 1.0:
                raise f.error("rope.scaling.yarn_ext_factor", blend, "1.0, the whole blend of YaRN")
        elif kind != "none":
            raise rope.unknown_scaling(f.where, kind)
        each = self.factors("rope_freqs.weight", frequencies)
        frequencies = frequencies if each is None else frequencies / each
        return RopeSpec(frequencies.astype(np.float32), magnitude, interleaved, theta=theta)

    def three_axes(self, rotation: RopeSpec, is_interleaved: bool) -> RopeSpec:
        """`rotation` with the file's numbers of frequencies for time, height and width, if there are any."""
        f, name = self.fields, "rope.dimension_sections"
        if not f.has(name):
            return rotation
        numbers = [int(number) for number in f.numbers(name, 4, low=-1.0, high=float(limits.MAX_HEAD_DIM))]
        return replace(rotation, axes=rope.section_axes(numbers[:3], rotation.dims // 2, is_interleaved))

    def local_rotation(self, dims: int, theta: float | None = None) -> RopeSpec:
        """Reads the rotation of sliding layers, which is not scaled.

        `theta`: its base if the file does not say it. None: that of the other layers.
        """
        f = self.fields
        usual = f.number("rope.freq_base", 1e4, low=1.0) if theta is None else theta
        return rope.unscaled(dims, f.number("rope.freq_base_swa", usual, low=1.0))

    def factors(self, name: str, frequencies: np.ndarray) -> np.ndarray | None:
        """Reads a tensor of divisors of the frequencies; None if it is absent."""
        found = self.vector(name)
        if found is None:
            return None
        where = f"{self.fields.where}: {name}"
        if found.shape != frequencies.shape:
            raise ModelFileError(
                f"{where} has shape {found.shape}; heads of {2 * len(frequencies)} need {frequencies.shape}"
            )
        if not (found >= 1e-6).all():
            raise ModelFileError(f"{where} has the factor {found.min()}; factors must be at least 1e-06")
        return found
