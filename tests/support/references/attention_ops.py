"""The definitions in numpy of the ops in `ckdist/program/ops/attention_ops.py`."""

import numpy as np

from ckdist.program.ops.attention_ops import bucket_of
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("rope")
def rope(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Rotates the first dimensions of each head by position * frequency. Su et al. 2021, arXiv:2104.09864."""
    return [rotate(context, inputs[0], attrs, 1)]


@reference("rope_grad")
def rope_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Rotates by the negative angle. Yarn's magnitude remains a factor."""
    return [rotate(context, inputs[0], attrs, -1)]


def rotate(context: RankContext, x: np.ndarray, attrs: Attrs, sign: int) -> np.ndarray:
    """Rotates the dimensions of each head, from `first` on, by sign * angle. x: (tokens, heads * head_dim)."""
    rotation, first = context.rope(attrs["table"]), attrs.get("first", 0)
    cos, sin = context.rope_tables(rotation)  # (tokens, rotated / 2)
    c, s, half = cos[:, None], sign * sin[:, None], cos.shape[1]
    heads = x.reshape(len(x), -1, attrs["inputs"][0].dims[-1].width)  # (tokens, heads, head_dim)
    rotated = heads[..., first : first + 2 * half]
    if rotation.interleaved:
        a, b = rotated[..., ::2], rotated[..., 1::2]
        rotated = np.stack([a * c - b * s, b * c + a * s], axis=-1).reshape(rotated.shape)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        rotated = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
    parts = [heads[..., :first], rotated, heads[..., first + 2 * half :]]
    return np.concatenate(parts, axis=-1).reshape(x.shape)


def is_listed(listed: Arrays, positions: int) -> np.ndarray:
    """Whether a token sees each position: (tokens, positions). `listed` is empty, or has the positions of tokens, -1
    for none.
    """
    if not listed:
        return np.ones((1, positions), bool)
    seen = np.zeros((len(listed[0]), positions + 1), bool)
    np.put_along_axis(seen, listed[0], True, axis=1)  # column -1 is for none
    return seen[:, :-1]


class Heads:
    """The kv-head of each query head on this rank, and the scores of one head. Shared by attend and its gradient."""

    def __init__(self, context: RankContext, attrs: Attrs, biases: np.ndarray | None = None):
        q_dim, kv_dim = (value.dims[-1] for value in attrs["inputs"][:2])
        self.widths, self.attrs = [value.dims[-1].width for value in attrs["inputs"]], attrs
        group, kv_begin = q_dim.count // kv_dim.count, context.share(kv_dim)[0]
        self.kv_heads = [head // group - kv_begin for head in range(*context.share(q_dim))]
        self.first, self.biases = context.share(q_dim)[0], None
        if biases is not None:
            self.biases = biases.reshape(-1, q_dim.count)

    def split(self, inputs: Arrays, index: int) -> np.ndarray:
        """Reshapes input `index` from (tokens, heads * width) to (tokens, heads, width)."""
        return inputs[index].reshape(len(inputs[index]), -1, self.widths[index])

    def scores(self, q: np.ndarray, k: np.ndarray, first: int = 0, head: int = 0) -> np.ndarray:
        """The scores of local head `head`: (tokens, positions), -inf if a key is not visible.

        q: (tokens, head_dim), at positions from `first` on. k: (positions, head_dim).
        """
        positions, own = np.arange(len(k))[None], first + np.arange(len(q))[:, None]
        scores = q @ k.T * np.float32(self.attrs["scale"])  # (tokens, positions)
        if self.biases is not None:  # (buckets, heads of all ranks)
            scores = scores + self.biases[bucket_of(positions - own, self.attrs), self.first + head]
        if self.attrs["soft_cap"]:
            scores = self.attrs["soft_cap"] * np.tanh(scores / self.attrs["soft_cap"])
        both, window = self.attrs.get("bidirectional", False), self.attrs["window"]
        visible = (positions <= own) | both
        if window < 0:  # chunks of -window tokens
            visible &= positions >= own // -window * -window
        elif window:
            visible &= (positions > own - window) & (positions < own + window)
        return np.where(visible, scores, -np.inf)


@reference("attend")
def attend(context: RankContext, inputs: Arrays, weights: list[np.ndarray | None], attrs: Attrs) -> Arrays:
    """Grouped-query attention over the cache, which the call extends. Vaswani et al. 2017, arXiv:1706.03762.

    It is causal unless `bidirectional`. A fourth input lists the positions that each token sees. The weights are
    optional: sinks, (heads,), and relative biases. A sink is a score per head that adds to the sum of exponentials and
    has no value. Xiao et al. 2023, arXiv:2309.17453; learned sinks: OpenAI 2025, arXiv:2508.10925.
    """
    sinks, biases = (*weights, None, None)[:2]
    heads = Heads(context, attrs, biases)
    q, k, v = (heads.split(inputs, i) for i in range(3))  # (tokens, heads, head_dim)
    # (positions, kv_heads, head_dim) each
    k_all, v_all = context.cache[attrs["layer"]] if attrs.get("shared") else context.extend_cache(attrs["layer"], k, v)
    out = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    seen = is_listed(inputs[3:], len(k_all))
    for h, kv in enumerate(heads.kv_heads):
        scores = np.where(seen, heads.scores(q[:, h], k_all[:, kv], len(k_all) - len(q), h), -np.inf)
        if sinks is not None:  # one more score, after those of the positions
            scores = np.concatenate([scores, np.full((len(q), 1), sinks[h], scores.dtype)], axis=1)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = (p / p.sum(axis=-1, keepdims=True))[:, : len(k_all)] @ v_all[:, kv]
    return [out.reshape(len(out), -1)]
