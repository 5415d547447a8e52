"""A model and the tokens that a training would learn: for the commands that compute the model's logits of them."""

import contextlib
import logging
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ckdist.cli.session import model_session, packed_first
from ckdist.comm.agreement import start_ranks
from ckdist.comm.world import together
from ckdist.config.distill_config import ScoredDataConfig
from ckdist.engine.loaded_model import Model
from ckdist.engine.prompt_scores import Piece, steps_of, windows
from ckdist.hub.resolve import resolve
from ckdist.program.executable import Executable
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tried import load_tried
from ckdist.train.data.chats import ChatProcess
from ckdist.train.data.data_files import find_files
from ckdist.train.data.token_cache import TokenCache, open_cache

log = logging.getLogger(__name__)


class ScoredData(NamedTuple):
    """The loaded model, and the data as a training reads it."""

    model: Model
    cache: TokenCache
    tokenizer: Tokenizer


@contextlib.contextmanager
def scored_data(config: ScoredDataConfig, verify: Callable[[], object] = bool) -> Iterator[ScoredData | None]:
    """Yields the model and the data on rank 0, None on the other ranks after rank 0 is done with them.

    Rank 0 calls `verify` before anything is loaded. Its error ends all ranks.
    """
    world = start_ranks(config)
    together(world, lambda: verify() if world.rank == 0 else None)
    model = resolve(config.model, world)
    tokenizer = pathlib.Path(str(resolve(config.tokenizer, world) if config.tokenizer else model))
    with tempfile.TemporaryDirectory() as folder:
        read = lambda: _tokens(config, tokenizer, folder) if world.rank == 0 else None
        tokens = together(world, read)  # a fault of the data ends all ranks before a weight is read
        with model_session(packed_first(config), world) as loaded:
            yield None if loaded is None or tokens is None else ScoredData(loaded, *tokens)


def _tokens(config: ScoredDataConfig, tokenizer: pathlib.Path, folder: str) -> tuple[TokenCache, Tokenizer]:
    with contextlib.closing(ChatProcess(tokenizer)) as chats:
        files, loaded = find_files(config.files, lambda line: log.warning("%s", line)), load_tried(tokenizer)
        bad = "skip" if config.skip_bad else "error"
        return open_cache(pathlib.Path(folder), files, loaded, config.text_column, bad, chats.write, True), loaded


def learned_tokens(cache: TokenCache, document: int, max_length: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32, learned bool) of a document. A chat longer than `max_length` is truncated as in a training."""
    begin, end = int(cache.starts[document]), int(cache.starts[document + 1])
    learned = np.ones(end - begin, bool) if cache.learned is None else np.asarray(cache.learned[begin:end]) > 0
    if max_length and not learned.all():
        end, learned = min(end, begin + max_length + 1), learned[: max_length + 1]
    return np.asarray(cache.tokens[begin:end], np.int32), learned


def learned_logits(
    executable: Executable, cache: TokenCache, first: int = 0, max_length: int = 0
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (documents that end with it, logits before learned tokens, these tokens) for each step.

    Documents are those from `first` on, in the cache's order. One that is longer than a step takes several.
    """

    def pieces(document: int) -> list[Piece]:
        return windows(*learned_tokens(cache, document, max_length), executable.context_length)

    following, tokens = first, np.empty(0, np.int32)
    for documents, logits in steps_of(executable, pieces, range(first, cache.documents)):
        while len(tokens) < len(logits):
            ids, learned = learned_tokens(cache, following, max_length)
            tokens, following = np.append(tokens, ids[1:][learned[1:]]), following + 1
        yield documents, logits, tokens[: len(logits)]
        tokens = tokens[len(logits) :]
