"""The head of a cross-encoder."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scorer:
    """The head of a cross-encoder: out(norm(activation(dense h))), with the hidden state h of the first token."""

    activation: str = "tanh"  # tanh, gelu, gelu_tanh, silu
    bias: bool = True  # of `dense`; `out` always has one
    norm: str = ""  # as in ModelSpec; "": none
    averages: bool = False  # h is the mean of all tokens
    sigmoid: bool = True  # the score is the sigmoid of the output
