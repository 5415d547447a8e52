"""The definitions in numpy of the ops in `ckdist/program/ops/latent_keys.py`."""

import numpy as np

from ckdist.layout import Dim
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


def by_head(w: np.ndarray, attrs: Attrs) -> np.ndarray:
    """Reshapes a weight from (heads * rank, nope) to (heads, rank, nope)."""
    return w.reshape(-1, attrs["weights"][0].dims[0].width, w.shape[1])


@reference("latent_keys")
def latent_keys(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head: [k[:rank] @ w_head, k[rank:]]. All heads share the rotated part k[rank:].

    k: (tokens, rank + rope), w: (heads * rank, nope) -> (tokens, heads * (nope + rope)).
    """
    (k,), w = inputs, by_head(weights[0], attrs)
    rank, tokens = w.shape[1], len(k)
    own = np.einsum("tr,hrn->thn", k[:, :rank], w)
    shared = np.broadcast_to(k[:, None, rank:], (tokens, len(w), k.shape[1] - rank))
    return [np.concatenate([own, shared], axis=-1).reshape(tokens, -1)]


@reference("latent_keys_grad")
def latent_keys_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """[sum over heads of dy[:nope] @ w_head.T, sum over heads of dy[nope:]]."""
    w = by_head(weights[0], attrs)
    dy, nope = inputs[0].reshape(len(inputs[0]), len(w), -1), w.shape[2]
    return [np.concatenate([np.einsum("thn,hrn->tr", dy[..., :nope], w), dy[..., nope:].sum(axis=1)], axis=-1)]


@reference("latent_keys_weight_grad")
def latent_keys_weight_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head: k[:rank].T @ dy[:nope]."""
    k, dy = inputs
    heads, rank, nope = by_head(weights[0], attrs).shape
    of_heads = dy.reshape(len(dy), heads, -1)[..., :nope]
    return [np.einsum("tr,thn->hrn", k[:, :rank], of_heads).reshape(weights[0].shape)]


@reference("latent_values")
def latent_values(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The first elements of the keys: the latent vectors."""
    return [inputs[0][:, : attrs["dim"].elements]]


@reference("latent_values_grad")
def latent_values_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The gradient, padded with zeros at the end."""
    dim: Dim = attrs["dim"]
    return [np.pad(inputs[0], ((0, 0), (0, dim.elements - inputs[0].shape[1])))]
