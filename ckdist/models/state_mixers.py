"""Mixers that keep a state of each sequence: linear attention, Mamba-2, short convolutions."""

import math
from dataclasses import dataclass

from ckdist.errors import ModelFileError
from ckdist.layout import Dim, Sharding
from ckdist.models import limits
from ckdist.models.spec import Attention


def _check_convolution(kernel: int, where: str) -> None:
    """Raises ModelFileError for a kernel of a length that is not supported."""
    if not 2 <= kernel <= limits.MAX_CONV:
        raise ModelFileError(f"{where}: a short convolution sees {kernel} tokens; it must see 2 to {limits.MAX_CONV}")


def _check_widths(where: str, *heads: tuple[int, int]) -> None:
    """Raises ModelFileError if heads, (number, elements of each), are too wide together."""
    for count, width in heads:
        if count * width > limits.MAX_WIDTH:
            raise ModelFileError(f"{where}: {count} heads of {width} are wider than the {limits.MAX_WIDTH} allowed")


def _parts(channels: int, sharding: Sharding) -> tuple[Dim, Dim]:
    """Channels as heads of 64, or of the largest smaller power of two that divides them."""
    width = math.gcd(channels, 64)
    return sharding.heads(channels // width, channels // width, width)


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention by the gated delta rule. Yang et al. 2024, arXiv:2412.06464.

    Each value head has a state of key_dim x value_dim. Several value heads may share a key head: value head i reads key
    head i // (value heads per key head), or i % num_key_heads if `tiled`.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of queries and keys, per head
    value_dim: int  # of values, per head
    conv_kernel: int = 4  # kernel length of the short convolution, in tokens
    tiled: bool = False
    by_row: bool = False  # each row of a state has its own decay: Kimi Delta Attention, arXiv:2510.26692
    gate_rank: int = 0  # with `by_row`: low rank of decays and output gates; 0: one matrix makes each
    full_gate: bool = False  # with `gate_rank`: the low rank makes decays alone, one matrix output gates
    decay_floor: float = 0.0  # with `by_row`: least logarithm of a decay, which a sigmoid bounds; 0: not bounded
    beta_scale: float = 1.0  # factor of the weight of new values; with 2 a state may change its sign
    norm_eps: float = 0.0  # epsilon of the norm of the output; 0: the model's
    output_gate: str = "silu"  # without `by_row`: the function of the output's gate

    def heads(self, sharding: Sharding, width: int = 1) -> tuple[Dim, Dim]:
        """The dimensions of value heads and key heads, of `width` elements each.

        If heads are tiled and shared, key heads are replicated: consecutive value heads read key heads far apart.
        """
        if not self.tiled or self.num_key_heads == self.num_value_heads:
            return sharding.heads(self.num_value_heads, self.num_key_heads, width)
        return sharding.heads(self.num_value_heads, self.num_value_heads, width)[0], Dim(
            "kv_heads", self.num_key_heads, width
        )

    def check(self, where: str) -> None:
        """Raises ModelFileError if the numbers do not fit together."""
        if self.num_value_heads % self.num_key_heads:
            raise ModelFileError(
                f"{where}: {self.num_value_heads} value heads of linear attention cannot share "
                f"{self.num_key_heads} key heads evenly"
            )
        _check_convolution(self.conv_kernel, where)
        _check_widths(where, (self.num_key_heads, self.key_dim), (self.num_value_heads, self.value_dim))


@dataclass(frozen=True)
class GatedConv:
    """LFM2's mixer: out_proj(c * convolution(b * x)), where a linear makes b, c and x."""

    channels: int
    conv_kernel: int = 3
    bias: bool = False  # of all three parts

    def heads(self, sharding: Sharding) -> tuple[Dim, Dim]:
        """The channels, sharded in parts of 64 or of the largest smaller power of two that divides them."""
        return _parts(self.channels, sharding)

    def check(self, where: str) -> None:
        """Raises ModelFileError for a kernel that is too short or too long."""
        _check_convolution(self.conv_kernel, where)


@dataclass(frozen=True)
class Mamba1:
    """Mamba-1. Gu & Dao 2023, arXiv:2312.00752. Each channel has a state of `state_dim` elements.

    Attributes:
        dt_rank: Low rank of the steps of time.
        norms: The norms of the low rank, b and c: "weights", "unit" (without weights) or "" (none).
        norm_eps: Their epsilon. 0: the model's.
    """

    channels: int
    state_dim: int
    dt_rank: int
    conv_kernel: int = 4
    conv_bias: bool = True
    bias: bool = False
    norms: str = ""
    norm_eps: float = 0.0

    def heads(self, sharding: Sharding) -> tuple[Dim, Dim]:
        """The channels, sharded in parts of 64 or of the largest smaller power of two that divides them."""
        return _parts(self.channels, sharding)

    def check(self, where: str) -> None:
        """Raises ModelFileError for a kernel that is too short or too long, or too many states."""
        _check_convolution(self.conv_kernel, where)
        _check_widths(where, (self.channels, 1))


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2. Dao & Gu 2024, arXiv:2405.21060. Each head has a state of state_dim x head_dim.

    Attributes:
        num_groups: Heads of a group share b and c.
        norm_groups: Parts of the output that are normed separately. 0: no norm.
        dt_limits: Least and largest step of time.
        scales: Factors on z, x, b, c and dt as in_proj makes them.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_kernel: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm_groups: int = 1
    dt_limits: tuple[float, float] = (0.0, math.inf)
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    def heads(self, sharding: Sharding) -> tuple[Dim, Dim]:
        """The dimensions of heads and groups, of one element each."""
        return sharding.heads(self.num_heads, self.num_groups, 1)

    def check(self, where: str) -> None:
        """Raises ModelFileError if the numbers do not fit together."""
        _check_convolution(self.conv_kernel, where)
        for name, count in (("groups", self.num_groups), ("parts of the norm", self.norm_groups or 1)):
            if self.num_heads % count:
                raise ModelFileError(f"{where}: {self.num_heads} heads of Mamba cannot be {count} equal {name}")
        _check_widths(where, (self.num_heads, self.head_dim), (self.num_groups, self.state_dim))


@dataclass(frozen=True)
class AttentionAndMamba:
    """Attention and Mamba-2 of the same input: attention_scale * attention(x) + mamba_scale * mamba(x)."""

    attention: Attention
    mamba: Mamba2
    attention_scale: float = 1.0
    mamba_scale: float = 1.0

    @property
    def parts(self) -> list[tuple[Attention | Mamba2, float]]:
        """The mixers, and the factors of their results."""
        return [(self.attention, self.attention_scale), (self.mamba, self.mamba_scale)]

    def check(self, where: str) -> None:
        """Raises ModelFileError if the numbers do not fit together."""
        self.mamba.check(where)
        limits.check_attention(self.attention, where)
