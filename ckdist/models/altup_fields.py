"""Alternating updates: a model has several streams of hidden states, and layers compute one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AltUp:
    """Baykal et al. 2023, arXiv:2301.13310. Each layer predicts all streams, computes the first and corrects all.

    A layer also adds norm(right(left x)), of a low rank: Menghani et al. 2024, arXiv:2411.07501 (LAuReL).
    """

    streams: int
    rank: int  # of left and right
