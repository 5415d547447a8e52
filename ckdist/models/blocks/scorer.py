"""The head of a cross-encoder: one score per row of hidden states."""

from dataclasses import dataclass

from ckdist.layout import Dim
from ckdist.models.blocks.norm import RowNorm
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer

PATH = "model.scorer"


@dataclass(frozen=True)
class Scorer:
    """The head of a cross-encoder: out(norm(activation(dense h))), with the hidden state h of the first token."""

    activation: str = "tanh"  # tanh, gelu, gelu_tanh, silu
    bias: bool = True  # of `dense`; `out` always has one
    norm: str = ""  # as in ModelSpec; "": none
    averages: bool = False  # h is the mean of all tokens
    sigmoid: bool = True  # the score is the sigmoid of the output


def scores(g: Tracer, x: Value, s: Scorer, eps: float) -> Value:
    """x: (outputs, hidden) after the last norm -> (outputs, 1). Each rank computes all rows."""
    w, hidden, score = lambda name, *dims: g.weight(f"{PATH}.{name}", *dims), x.dims[-1], Dim("score", 1)
    x = g.mean_rows(x) if s.averages else x
    inner = Dim("scorer", hidden.elements)
    bias = (w("dense.bias", inner),) if s.bias else ()
    x = g.activate(g.linear(x, w("dense.weight", inner, hidden), bias=bias, names=["dense"]), s.activation)
    x = RowNorm(s.norm, eps)(g, x, f"{PATH}.norm") if s.norm else x
    return g.linear(x, w("out.weight", score, x.dims[-1]), bias=(w("out.bias", score),), names=["score"])
