"""Residuals by attention over blocks of layers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockResiduals:
    """Kimi Team 2026, arXiv:2603.15031 (attention residuals). Each part of a layer reads a weighted sum.

    Its terms are the residual streams before each block of `size` layers, and the one of the own block. A block's
    stream is the sum of the results of its own parts.
    """

    size: int
    normed: bool = True  # scores have a norm with weights; GGUF has the product of both vectors
