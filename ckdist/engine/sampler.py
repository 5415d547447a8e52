"""Chooses tokens from logits: the Python face of the native sampler, which does all of the work per row.

It holds no state of sequences: the same row and logits give the same token, whoever else is in the call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckdist import errors, native
from ckdist.engine.sampling import SamplingParams

MAX_TOP = 20  # most alternatives that log-probabilities are given for

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class SampleRow:
    """What decides one row's token besides its logits.

    `position` is that of the token to be drawn. The token lists matter for penalties alone; int32 arrays and
    `array.array("i")` are read without a copy.
    """

    params: SamplingParams
    seed: int = 0
    position: int = 0
    prompt_tokens: Sequence[int] = field(default=())
    output_tokens: Sequence[int] = field(default=())


class Sample(NamedTuple):
    """A token, its log-probability before penalties, bias and temperature, and the most likely tokens with theirs."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Samples rows of float32 logits over one vocabulary. One thread at a time.

    What it does between two steps runs from cold caches, where a numpy array of results or its address costs what a sampled row does:
    results are cffi's, and addresses are those of buffers.
    """

    def __init__(self, vocab_size: int):
        handle = native.lib.ckdist_sampler_open(vocab_size)
        if not handle:
            native.check(-5)
        self._handle = native.ffi.gc(handle, native.lib.ckdist_sampler_close)
        self._vocab_size = vocab_size

    def sample(self, logits: np.ndarray, rows: Sequence[SampleRow]) -> list[Sample]:
        """One token per row. logits: (rows, vocab) float32.

        Raises NativeError where logits are not finite and ConfigError where a parameter is out of range; both name the row.
        """
        address, stride = self._address(logits, len(rows))
        if all(_is_plain_greedy(row.params) for row in rows):
            tokens = native.ffi.new("int32_t[]", len(rows))
            native.check(native.lib.ckdist_sample_greedy(self._handle, address, stride, len(rows), tokens))
            return [Sample(token) for token in tokens]
        sampling = native.ffi.new("struct ckdist_sampling[]", len(rows))
        alive = [_fill(sampling[i], row) for i, row in enumerate(rows)]
        out = native.ffi.new("struct ckdist_sampled_token[]", len(rows))
        native.check(native.lib.ckdist_sample(self._handle, address, stride, len(rows), sampling, out))
        del alive  # the arrays that `sampling` points into were needed until here
        return [_read(sample, row.params.logprobs is not None) for sample, row in zip(out, rows)]

    def logprobs(self, logits: np.ndarray, targets: np.ndarray, top: int = 0) -> list[Sample]:
        """The log-probability of one given token per row, and of the `top` most likely ones.

        logits: (rows, vocab) float32; targets: (rows,) int32. Raises as `sample` does.
        """
        address, stride = self._address(logits, len(targets))
        targets = np.ascontiguousarray(targets, np.int32)
        out = native.ffi.new("struct ckdist_sampled_token[]", len(targets))
        native.check(native.lib.ckdist_logprobs(self._handle, address, stride, len(targets), native.pointer(targets, "int32_t *"), top, out))
        return [_read(sample, True) for sample in out]

    def _address(self, logits: np.ndarray, rows: int):
        if logits.dtype != _FLOAT32 or logits.ndim != 2 or logits.shape != (rows, self._vocab_size) or logits.strides[1] != 4:
            raise errors.NativeError(
                f"logits are {logits.dtype} {logits.shape}; the sampler needs float32 ({rows}, {self._vocab_size}) with dense rows"
            )
        return native.ffi.from_buffer("float *", logits[:1]), logits.strides[0] // 4


def _is_plain_greedy(params: SamplingParams) -> bool:
    return (
        params.temperature == 0
        and params.logprobs is None
        and params.repetition_penalty == 1
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and not params.logit_bias
    )


def _fill(out, row: SampleRow) -> list[np.ndarray]:
    """Writes a row into a struct ckdist_sampling; returns the arrays that it points to."""
    params = row.params
    out.temperature, out.top_k, out.top_p, out.min_p = params.temperature, params.top_k, params.top_p, params.min_p
    out.repetition_penalty = params.repetition_penalty
    out.presence_penalty, out.frequency_penalty = params.presence_penalty, params.frequency_penalty
    out.top_logprobs = -1 if params.logprobs is None else params.logprobs
    out.seed, out.position = row.seed & 0xFFFF_FFFF_FFFF_FFFF, row.position
    alive = []

    def tokens(values):
        array = np.ascontiguousarray(values, np.int32)
        alive.append(array)
        return native.pointer(array, "int32_t *"), len(array)

    if params.repetition_penalty != 1:
        out.prompt_tokens, out.prompt_count = tokens(row.prompt_tokens)
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        out.output_tokens, out.output_count = tokens(row.output_tokens)
    if params.logit_bias:
        out.bias_tokens, out.bias_count = tokens(list(params.logit_bias))
        values = np.array(list(params.logit_bias.values()), np.float32)
        alive.append(values)
        out.bias_values = native.pointer(values, "float *")
    return alive


def _read(sample, with_logprob: bool) -> Sample:
    """A struct ckdist_sampled_token."""
    if not with_logprob:
        return Sample(sample.token)
    n = sample.top_count
    return Sample(sample.token, sample.logprob, tuple(zip(sample.top_tokens[0:n], sample.top_logprobs[0:n])))
