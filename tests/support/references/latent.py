"""The definitions in numpy of the ops in `ckdist/program/ops/latent.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.attention_ops import is_listed
from tests.support.references.rms_norm import inverse_rms


@reference("norm_latent")
def norm_latent(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """[rms_norm(x[:n]) * w, x[n:]] for a weight of n elements."""
    (x,), (w,) = inputs, weights
    latent = x[:, : len(w)]
    return [np.concatenate([latent * inverse_rms(latent, attrs["eps"]) * w, x[:, len(w) :]], axis=-1)]


@reference("norm_latent_grad")
def norm_latent_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """rms_norm_grad on the first elements. The gradient of the others is passed on."""
    (x, dy), (w,) = inputs, weights
    n = len(w)
    latent, dn = x[:, :n], dy[:, :n] * w
    r = inverse_rms(latent, attrs["eps"])
    normed = latent * r
    dx = r * (dn - normed * np.mean(dn * normed, axis=-1, keepdims=True))
    whole_dx = np.concatenate([dx, dy[:, n:]], axis=-1)
    return [whole_dx, (dy[:, :n] * normed).sum(axis=0)] if attrs["weight_grad"] else [whole_dx]


@reference("attend_latent")
def attend_latent(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Causal attention over the cache, which the call extends. Values are the first elements of the keys.

    A third input lists the positions that each token sees.
    """
    q, k, *listed = inputs
    keys, _ = context.extend_cache(attrs["layer"], k, k[:, : attrs["value_width"]])  # (positions, key width)
    heads = q.reshape(len(q), -1, keys.shape[1])  # (tokens, heads, key width)
    scores = np.einsum("thw,pw->htp", heads, keys) * np.float32(attrs["scale"])
    first = len(keys) - len(q)
    visible = (np.arange(len(keys)) <= first + np.arange(len(q))[:, None]) & is_listed(listed, len(keys))
    scores = np.where(visible, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("htp,pv->thv", p / p.sum(axis=-1, keepdims=True), keys[:, : attrs["value_width"]])
    return [out.reshape(len(q), -1)]
