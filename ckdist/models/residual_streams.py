"""Models with several residual streams."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HyperConnections:
    """Xie et al. 2025, arXiv:2512.24880 (mHC). The residual stream is several, which each part of a layer mixes."""

    count: int
    iterations: int  # divisions of rows and columns of the matrix that mixes streams
    eps: float
    mean: bool = False  # the last layer's output is the mean of streams
    apart: bool = False  # streams are not mixed
    magnitude: float = 2.0  # factor of the weights of a part's result
    normed = False  # the last layer's output


@dataclass(frozen=True)
class AltUp:
    """Baykal et al. 2023, arXiv:2301.13310. Each layer predicts all streams, computes the first and corrects all.

    A layer also adds norm(right(left x)), of a low rank: Menghani et al. 2024, arXiv:2411.07501 (LAuReL).
    """

    streams: int
    rank: int  # of left and right


@dataclass(frozen=True)
class BlockResiduals:
    """Kimi Team 2026, arXiv:2603.15031 (attention residuals). Each part of a layer reads a weighted sum.

    Its terms are the residual streams before each block of `size` layers, and the one of the own block. A block's
    stream is the sum of the results of its own parts.
    """

    size: int
    normed: bool = True  # scores have a norm with weights; GGUF has the product of both vectors
