"""`ckdist perplexity`: exp of the mean negative log-likelihood of a text, and its logits on request."""

import json
import os
import pathlib

import numpy as np

from ckdist.cli.session import model_session
from ckdist.config import PerplexityConfig
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError
from ckdist.tokens.source import tokenizer_of


def log_likelihoods(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """log softmax(logits)[target]: float64 (tokens,) for float32 logits (tokens, vocab)."""
    x = logits.astype(np.float64)
    top = x.max(axis=1)
    return x[np.arange(len(targets)), targets] - top - np.log(np.exp(x - top[:, None]).sum(axis=1))


def read_tokens(config: PerplexityConfig, checkpoint, vocab_size: int) -> np.ndarray:
    """The ids that the flags name; ConfigError for a file that cannot be read, too few ids or one outside the vocabulary."""
    if config.token_ids is not None:
        ids = np.array(config.token_ids, np.int64)
    else:
        try:
            text = pathlib.Path(config.file).read_text(errors="replace")
        except OSError as error:
            raise ConfigError(f"cannot read {config.file}: {error.strerror}") from None
        ids = np.array(tokenizer_of(checkpoint.path).encode(text), np.int64)
    if len(ids) < 2:
        raise ConfigError(f"{len(ids)} tokens cannot be scored: give at least 2")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ConfigError(f"token id {ids.max()} is outside the vocabulary of {vocab_size}")
    return ids.astype(np.int32)


def score(executable, ids: np.ndarray, logits_file=None) -> np.ndarray:
    """Log-likelihoods of ids[1:], float64, in windows of the context; the first half of every later window is only read.

    `logits_file`: float32 (tokens, vocab) array to fill, for ids that fit one context.
    """
    context = executable.context_length
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
                scored.append(log_likelihoods(logits[first : len(targets)], targets[first:]))
        if begin + len(window) >= len(ids):
            break
        begin += len(window) - context // 2 - 1
    return np.concatenate(scored)


def run(config: PerplexityConfig) -> int:
    with model_session(config) as model:
        if model is None:
            return 0
        ids = read_tokens(config, model.checkpoint, model.spec.vocab_size)
        logits = temporary = None
        if config.save_logits:
            if len(ids) > model.executable.context_length:
                raise ConfigError(f"--save-logits of {len(ids)} tokens needs a context of as many; it is {model.executable.context_length}: use --ctx-size {len(ids)}")
            temporary = pathlib.Path(config.save_logits).with_suffix(".npy.tmp")
            try:
                logits = np.lib.format.open_memmap(temporary, "w+", np.float32, (len(ids), model.spec.vocab_size))
            except OSError as error:
                raise ConfigError(f"cannot write {config.save_logits}: {error.strerror}") from None
        scores = score(model.executable, ids, logits)
        if logits is not None:
            logits.flush()
            os.replace(temporary, config.save_logits)
        result = {"tokens": len(ids), "scored": len(scores), "nll": float(-scores.mean()), "perplexity": float(np.exp(-scores.mean()))}
        print(json.dumps(result) if config.json else f"perplexity {result['perplexity']:.4f} over {result['scored']} tokens (mean nll {result['nll']:.5f})")
    return 0
