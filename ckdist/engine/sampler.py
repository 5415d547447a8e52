"""Chooses tokens from logits: the Python side of the native sampler, which does all work per row.

It holds no state of sequences. A row and its logits give the same token, whatever other rows are in the call.
"""

from typing import Any, NamedTuple

import numpy as np

from ckdist import errors, native
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.sequence import Sequence
from ckdist.native import CData
from ckdist.program.pool import ThreadPool

MAX_WINDOW = 2**31 - 1  # tokens
BREAKERS_SECONDS = 30.0  # limit; it takes milliseconds

_FLOAT32 = np.dtype(np.float32)
_STEPS = {
    "penalties": native.lib.CKDIST_STEP_PENALTIES,
    "dry": native.lib.CKDIST_STEP_DRY,
    "temperature": native.lib.CKDIST_STEP_TEMPERATURE,
    "top_n_sigma": native.lib.CKDIST_STEP_TOP_N_SIGMA,
    "top_k": native.lib.CKDIST_STEP_TOP_K,
    "typ_p": native.lib.CKDIST_STEP_TYPICAL_P,
    "top_p": native.lib.CKDIST_STEP_TOP_P,
    "min_p": native.lib.CKDIST_STEP_MIN_P,
    "xtc": native.lib.CKDIST_STEP_XTC,
}


class Sample(NamedTuple):
    """A sampled token."""

    token: int
    logprob: float | None = None  # before penalties, bias and temperature
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens with their log probabilities
    mirostat_mu: float | None = None  # the sequence's state for its next token


class Sampler:
    """Samples rows of float32 logits over one vocabulary. One thread at a time.

    Its work between two steps runs with cold caches. There a numpy array of results, or an array's address, costs as
    much as sampling a row. So results are cffi arrays, and addresses come from buffers.

    Args:
        vocab_size: Columns of the logits.
        pool: Threads that divide the rows of a call. No job of theirs runs during a call.

    Raises:
        NativeError: `vocab_size` is not between 1 and 2^28.
    """

    def __init__(self, vocab_size: int, pool: ThreadPool | None = None) -> None:
        handle = native.lib.ckdist_sampler_open(vocab_size, pool.handle if pool else native.ffi.NULL)
        if not handle:
            native.check(-5)
        self._handle = native.ffi.gc(handle, native.lib.ckdist_sampler_close)
        self._vocab_size = vocab_size

    def sample(self, logits: np.ndarray, rows: list[Sequence]) -> list[Sample]:
        """Draws the next token of one sequence per row of float32 (rows, vocab) logits.

        Raises:
            NativeError: Logits are not finite. Names the row.
            ConfigError: A parameter is out of range. Names the row.
        """
        address, stride = self._address(logits, len(rows))
        if all(row.params.is_greedy and row.sampling_state is None for row in rows):
            tokens = native.ffi.new("int32_t[]", len(rows))
            native.check(native.lib.ckdist_sample_greedy(self._handle, address, stride, len(rows), tokens))
            return [Sample(token) for token in tokens]
        sampling = native.ffi.new("struct ckdist_sampling[]", [row.params.native_fields for row in rows])
        alive = [_fill(sampling[i], row) for i, row in enumerate(rows)]
        out = native.ffi.new("struct ckdist_sampled_token[]", len(rows))
        native.check(native.lib.ckdist_sample(self._handle, address, stride, len(rows), sampling, out))
        del alive  # keeps the arrays that `sampling` points into until here
        return [_read(sample, row.params) for sample, row in zip(out, rows, strict=True)]

    def logprobs(self, logits: np.ndarray, targets: np.ndarray, top: int = 0) -> list[Sample]:
        """The log probability of one given token per row, and of the `top` most likely ones.

        Args:
            logits: float32 (rows, vocab).
            targets: int32 (rows,).

        Raises the errors of `sample`.
        """
        address, stride = self._address(logits, len(targets))
        targets = np.ascontiguousarray(targets, np.int32)
        out = native.ffi.new("struct ckdist_sampled_token[]", len(targets))
        native.check(
            native.lib.ckdist_logprobs(
                self._handle, address, stride, len(targets), native.pointer(targets, "int32_t *"), top, out
            )
        )
        return [Sample(sample.token, sample.logprob, _top(sample)) for sample in out]

    def _address(self, logits: np.ndarray, rows: int) -> tuple[CData, int]:
        """Address of the logits and floats per row. Raises NativeError unless they are (rows, vocab)."""
        if (
            logits.dtype != _FLOAT32
            or logits.ndim != 2
            or logits.shape != (rows, self._vocab_size)
            or logits.strides[1] != 4
        ):
            raise errors.NativeError(
                f"logits are {logits.dtype} {logits.shape}; "
                f"the sampler needs float32 ({rows}, {self._vocab_size}) with dense rows"
            )
        return native.ffi.from_buffer("float *", logits[:1]), logits.strides[0] // 4


def _fill(out: CData, row: Sequence) -> list[Any]:
    """Adds a row to a struct ckdist_sampling with `native_fields`. Returns the owners of the memory it points to."""
    params, state = row.params, row.sampling_state
    out.top_logprobs = -1 if params.logprobs is None else params.logprobs
    out.seed, out.position = row.seed & 0xFFFF_FFFF_FFFF_FFFF, row.length
    alive: list[Any] = []

    def tokens(values: list[int] | np.ndarray) -> tuple[CData, int]:
        """Address and number of int32 values, which are kept alive."""
        array = np.ascontiguousarray(values, np.int32)
        alive.append(array)
        return native.pointer(array, "int32_t *"), len(array)

    active = params.active_samplers
    penalties, dry = "penalties" in active, "dry" in active
    if penalties and params.repeat_last_n is not None:
        out.penalty_window = params.repeat_last_n if params.repeat_last_n > 0 else MAX_WINDOW
    if dry and state is not None and state.breakers is not None:
        breakers = state.breakers.result(BREAKERS_SECONDS)
        alive.append(breakers)
        out.dry_breakers = breakers
    if penalties or dry:
        if dry or params.repetition_penalty != 1 or params.repeat_last_n is not None:
            out.prompt_tokens, out.prompt_count = tokens(row.prompt)
        out.output_tokens, out.output_count = tokens(row.output)
    if params.logit_bias:
        out.bias_tokens, out.bias_count = tokens(list(params.logit_bias))
        values = np.array(list(params.logit_bias.values()), np.float32)
        alive.append(values)
        out.bias_values = native.pointer(values, "float *")
    if state is not None and state.banned is not None:
        out.banned_tokens, out.banned_count = tokens(state.banned)
    if state is not None and state.constraint is not None:
        allowed = state.constraint.allowed
        out.allowed, out.allowed_words = native.ffi.from_buffer("uint32_t *", allowed), len(allowed)
    if params.steps is not None:
        out.steps, out.step_count = tokens([_STEPS[name] for name in params.steps])
        if params.mirostat:
            out.mirostat_mu = 2 * params.mirostat_tau if state is None else state.mirostat_mu
    return alive


def _read(sample: CData, params: SamplingParams) -> Sample:
    mu = sample.mirostat_mu if params.mirostat else None
    if params.logprobs is None:
        return Sample(sample.token, mirostat_mu=mu)
    return Sample(sample.token, sample.logprob, _top(sample), mu)


def _top(sample: CData) -> tuple[tuple[int, float], ...]:
    """The most likely tokens of a struct ckdist_sampled_token, with their log probabilities."""
    n = sample.top_count
    return tuple(zip(sample.top_tokens[0:n], sample.top_logprobs[0:n], strict=True))
