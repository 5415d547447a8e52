"""`ckdist perplexity`: exp of the mean negative log-likelihood of a text, and its logits on request."""

import contextlib
import json
import os
import pathlib

import numpy as np

from ckdist.cli.session import longer_context, model_session, packed_first
from ckdist.comm.agreement import start_ranks
from ckdist.config.perplexity_config import PerplexityConfig
from ckdist.engine.sampler import Sampler
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError
from ckdist.program.executable import Executable
from ckdist.regular_file import check_replaceable
from ckdist.text_file import read_text_file
from ckdist.tokens.tried import load_tried
from ckdist.weights.checkpoint import Checkpoint

MAX_TEXT_BYTES = 1 << 28


def log_likelihoods(sampler: Sampler, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns log softmax(logits)[target]: float64 (tokens,) for float32 logits (tokens, vocab)."""
    samples = sampler.logprobs(logits, targets) if len(targets) else []
    return np.array([sample.logprob for sample in samples], np.float64)


def tokens_of(config: PerplexityConfig, text: str | None, checkpoint: Checkpoint, vocab_size: int) -> np.ndarray:
    """Returns the ids of `text`, or of --token-ids if it is None: int32 (tokens,).

    Raises:
        ConfigError: There are fewer than 2 ids, or one is outside the vocabulary.
    """
    ids = np.array(
        config.token_ids if text is None else load_tried(checkpoint.path, checkpoint.overrides).encode(text), np.int64
    )
    if len(ids) < 2:
        raise ConfigError(f"{len(ids)} tokens cannot be scored: give at least 2")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ConfigError(f"token id {ids.max()} is outside the vocabulary of {vocab_size}")
    return ids.astype(np.int32)


class LogitsFile:
    """A .npy file of float32 (tokens, vocab). It appears under its name when it is complete; a failure leaves no file.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: str, shape: tuple[int, int]):
        self.path, self.temporary = path, f"{path}.tmp"
        try:
            check_replaceable(path)
            self.array = np.lib.format.open_memmap(self.temporary, "w+", np.float32, shape)
            # Reserves the disk space at once: a mapped page without space would kill the process.
            with open(self.temporary, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        except (OSError, ValueError) as error:
            self.discard()
            raise ConfigError(
                f"cannot write --save-logits {path}: {getattr(error, 'strerror', None) or error}"
            ) from None

    def discard(self) -> None:
        """Removes the incomplete file."""
        with contextlib.suppress(OSError, ValueError):
            pathlib.Path(self.temporary).unlink()

    def __enter__(self) -> np.ndarray:
        return self.array

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
            return
        self.array.flush()
        pathlib.Path(self.temporary).replace(self.path)


def score(executable: Executable, ids: np.ndarray, logits_file: np.ndarray | None = None) -> np.ndarray:
    """Returns the log-likelihoods of ids[1:], float64, in windows of the context.

    The first half of every later window is context only.

    Args:
        logits_file: float32 (tokens, vocab) array to fill. The ids must then fit one context.
    """
    context, sampler = executable.context_length, Sampler(executable.vocab_size)
    scored = []
    begin = 0
    while begin + 1 < len(ids) or begin == 0:
        window = ids[begin : begin + context]
        skip = 0 if begin == 0 else context // 2
        sequence = SingleSequence(executable)
        for at in range(0, len(window), executable.max_tokens):
            chunk = window[at : at + executable.max_tokens]
            logits = sequence.feed(chunk)
            if logits_file is not None:
                logits_file[at : at + len(chunk)] = logits
            targets = window[at + 1 : at + 1 + len(chunk)]
            first = max(0, skip - at)
            if first < len(targets):
                scored.append(log_likelihoods(sampler, logits[first : len(targets)], targets[first:]))
        if begin + len(window) >= len(ids):
            break
        begin += len(window) - context // 2 - 1
    return np.concatenate(scored)


def run(config: PerplexityConfig) -> int:
    """Prints the perplexity of a text. With --save-logits also writes its logits. Returns 0."""
    world = start_ranks(config)
    text = (
        read_text_file(config.file, f"--file {config.file}", MAX_TEXT_BYTES, "replace")
        if world.rank == 0 and config.file is not None
        else None
    )
    with model_session(packed_first(config), world) as model:
        if model is None:
            return 0
        ids = tokens_of(config, text, model.checkpoint, model.spec.vocab_size)
        saved = contextlib.nullcontext()
        if config.save_logits is not None:
            context = model.executable.context_length
            if len(ids) > context:
                raise ConfigError(
                    f"--save-logits with {len(ids)} tokens needs a context of {len(ids)}, not {context}: "
                    f"{longer_context(len(ids), model.spec)}"
                )
            saved = LogitsFile(config.save_logits, (len(ids), model.spec.vocab_size))
        with saved as logits:
            scores = score(model.executable, ids, logits)
        result = {
            "tokens": len(ids),
            "scored": len(scores),
            "nll": float(-scores.mean()),
            "perplexity": float(np.exp(-scores.mean())),
        }
        print(
            json.dumps(result)
            if config.json
            else f"perplexity {result['perplexity']:.4f} over {result['scored']} tokens (mean nll {result['nll']:.5f})"
        )
    return 0
