"""`ckdist distill FILE... -m TEACHER -o OUT`: a teacher's most probable tokens at each token that a training learns."""

import hashlib
import logging
import time

import numpy as np

from ckdist.cli.scored_data import learned_logits, scored_data
from ckdist.config.distill_config import DistillConfig
from ckdist.program.executable import Executable
from ckdist.progress import ProgressBar
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.data.teacher_file import Header, TeacherWriter, data_digests, learned_before, verify_place
from ckdist.train.data.token_cache import TokenCache
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.model_files import model_files

log = logging.getLogger(__name__)
SAVE_SECONDS = 5.0
ROWS = 128  # of logits that are sorted at once


def run(config: DistillConfig) -> int:
    """Writes the file. Returns 0."""
    with scored_data(config, lambda: verify_place(str(config.output))) as data:
        if data is not None:
            _write(config, data.model.checkpoint, data.model.executable, data.cache, data.tokenizer)
    return 0


def _write(
    config: DistillConfig, checkpoint: Checkpoint, executable: Executable, cache: TokenCache, tokenizer: Tokenizer
) -> None:
    known, before = min(tokenizer.vocab_size, executable.vocab_size), learned_before(cache)
    header = Header(
        **{"teacher": str(config.model)[-200:], "digest": model_digest(checkpoint), **data_digests(cache, tokenizer)},
        choices=min(config.top_k, known),
        temperature=config.temperature,
        context=executable.context_length,
        entries=int(before[-1]),
    )
    writer = TeacherWriter(str(config.output), header)
    if writer.is_complete:
        log.info("%s is complete", config.output)
        return
    if writer.documents:
        log.info("%d of %d sequences are done", writer.documents, cache.documents)
    saved, mass, first = time.monotonic(), 0.0, writer.entries
    with ProgressBar(header.entries, "token", "distilling", start=first, lines=True) as bar:
        for documents, logits, _ in learned_logits(executable, cache, writer.documents):
            parts = [top_choices(logits[at : at + ROWS], header, known) for at in range(0, max(1, len(logits)), ROWS)]
            ids, logprobs = map(np.concatenate, zip(*parts, strict=True))
            writer.add(documents, ids, logprobs)
            mass += float(np.exp(logprobs).sum())
            bar.update(len(ids))
            if time.monotonic() - saved > SAVE_SECONDS:
                writer.save()
                saved = time.monotonic()
    writer.finish()
    log.info(
        "%s: %d tokens; the %d choices of each have %.2f %% of the probability",
        *(config.output, header.entries, header.choices, 100 * mass / max(1, header.entries - first)),
    )


def top_choices(logits: np.ndarray, header: Header, known: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, log-probabilities) of the most probable of the first `known` tokens, ids ascending: (rows, choices)."""
    z = logits / np.float32(header.temperature)
    most = z.max(axis=1, keepdims=True)
    log_sum = most + np.log(np.exp(z - most).sum(axis=1, keepdims=True, dtype=np.float64))
    ids = np.sort(np.argpartition(z[:, :known], known - header.choices, axis=1)[:, known - header.choices :], axis=1)
    return ids, np.minimum(np.take_along_axis(z, ids, 1) - log_sum, 0)


def model_digest(checkpoint: Checkpoint) -> str:
    """A digest of blocks of the model's files: the headers, and some of each tensor."""
    files, digest = model_files(checkpoint), hashlib.sha256()
    for file in files:
        digest.update(f"{file.size} ".encode() + file.digests(file.sample(len(files))).tobytes())
    return digest.hexdigest()[:32]
