"""`ckdist distill FILE... -m TEACHER -o OUT`: a teacher's most probable tokens at each token that a training learns."""

import contextlib
import hashlib
import logging
import pathlib
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from ckdist.cli.session import model_session, packed_first
from ckdist.comm.agreement import start_ranks
from ckdist.comm.world import together
from ckdist.config.distill_config import DistillConfig
from ckdist.engine.prompt_scores import Piece, steps_of, windows
from ckdist.hub.resolve import resolve
from ckdist.progress import ProgressBar
from ckdist.program.executable import Executable
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tried import load_tried
from ckdist.train.data.chats import ChatProcess
from ckdist.train.data.data_files import find_files
from ckdist.train.data.teacher_file import Header, TeacherWriter, data_digests, learned_before
from ckdist.train.data.token_cache import TokenCache, open_cache
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.model_files import model_files

log = logging.getLogger(__name__)
SAVE_SECONDS = 5.0
ROWS = 128  # of logits that are sorted at once


def run(config: DistillConfig) -> int:
    """Writes the file. Returns 0."""
    world = start_ranks(config)
    model = resolve(config.model, world)
    tokenizer = resolve(config.tokenizer, world) if config.tokenizer else model
    with tempfile.TemporaryDirectory() as folder:
        read = lambda: _tokens(config, pathlib.Path(str(tokenizer)), folder) if world.rank == 0 else None
        tokens = together(world, read)  # a fault of the data ends all ranks before a weight is read
        with model_session(packed_first(config), world) as loaded:
            if loaded is not None and tokens is not None:
                _write(config, loaded.checkpoint, loaded.executable, *tokens)
    return 0


def _tokens(config: DistillConfig, tokenizer: pathlib.Path, folder: str) -> tuple[TokenCache, Tokenizer]:
    """The tokens as a training reads them."""
    with contextlib.closing(ChatProcess(tokenizer)) as chats:
        files, loaded = find_files(config.files, lambda line: log.warning("%s", line)), load_tried(tokenizer)
        bad = "skip" if config.skip_bad else "error"
        return open_cache(pathlib.Path(folder), files, loaded, config.text_column, bad, chats.write, True), loaded


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
    with ProgressBar(header.entries - first, "tokens", "distilling", True) as bar:
        for documents, logits in _logits(executable, cache, writer.documents):
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


def _logits(executable: Executable, cache: TokenCache, first: int) -> Iterator[tuple[int, np.ndarray]]:
    """(documents, logits before their learned tokens) from document `first` on, in the cache's order."""

    def pieces(document: int) -> list[Piece]:
        begin, end = int(cache.starts[document]), int(cache.starts[document + 1])
        ids = np.asarray(cache.tokens[begin:end], np.int32)
        learned = np.ones(end - begin, bool) if cache.learned is None else cache.learned[begin:end] > 0
        return windows(ids, learned, executable.context_length)

    yield from steps_of(executable, pieces, range(first, cache.documents))


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
