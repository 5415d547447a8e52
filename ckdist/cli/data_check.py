"""`ckdist data check FILE... -m MODEL`: how a training reads the files, and which tokens it learns."""

import contextlib
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Iterator

import numpy as np

from ckdist.config.tuning_commands import DataCommand
from ckdist.errors import ConfigError
from ckdist.hub.resolve import resolve
from ckdist.terminal import has_colours, styled
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tried import load_tried
from ckdist.train.data.chats import ChatProcess
from ckdist.train.data.data_files import find_files
from ckdist.train.data.data_report import counted
from ckdist.train.data.preferences import KINDS
from ckdist.train.data.token_cache import TokenCache, open_cache
from ckdist.train.data.truncation import count_truncated, describe_truncation

BEGIN, END = ">>>", "<<<"  # around learned text if there are no colours
HEAD_TOKENS, TAIL_TOKENS = 150, 250  # of a long sequence that are shown


def run(command: DataCommand) -> int:
    """Prints the counts and some sequences. Returns 1 if records cannot be used."""
    model = resolve(command.model) or ""
    tokenizer = load_tried(model)
    notes: list[str] = []
    files = find_files(command.files, notes.append)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(ChatProcess(pathlib.Path(model))) as chats:
        kind = KINDS.get(command.method, "")
        cache = open_cache(
            pathlib.Path(folder), files, tokenizer, command.text_column, "skip", chats.write, quiet=True, kind=kind
        )
        for line in (*notes, *report_lines(cache, command.max_length)):
            print(printable(line))
        for document in chosen(cache.documents, command.samples):
            print(f"\n{styled(heading(cache, document), 'strong', sys.stdout)}")
            print(shown(cache, document, tokenizer))
    return 1 if cache.report.skipped else 0


def report_lines(cache: TokenCache, max_length: int) -> Iterator[str]:
    """The counts of records, tokens and truncated sequences."""
    yield from cache.report.lines()
    if cache.report.skipped:
        yield f"{counted(cache.report.skipped, 'record')} cannot be used:"
        yield from (f"  {line}" for line in cache.report.bad)
    learned = cache.tokens.size if cache.learned is None else int(cache.learned.sum())
    sizes = np.diff(cache.starts)
    yield f"{cache.tokens.size} tokens, {learned} of them learned; the longest sequence has {int(sizes.max())}"
    if max_length:
        counts = count_truncated(cache, np.arange(cache.documents), max_length)
        try:
            yield from describe_truncation(counts, cache, max_length, "data")
        except ConfigError as error:
            yield str(error)


def chosen(documents: int, count: int) -> list[int]:
    """`count` documents, evenly spread over all."""
    return sorted({index * documents // count for index in range(min(count, documents))}) if count else []


def heading(cache: TokenCache, document: int) -> str:
    """The place and the size of a sequence."""
    return f"{printable(cache.where(document))}: {int(cache.starts[document + 1] - cache.starts[document])} tokens"


def shown(cache: TokenCache, document: int, tokenizer: Tokenizer) -> str:
    """A sequence as text. Learned tokens are coloured, or between marks."""
    begin, end = int(cache.starts[document]), int(cache.starts[document + 1])
    learned = np.ones(end - begin, bool) if cache.learned is None else np.asarray(cache.learned[begin:end], bool)
    ids = cache.tokens[begin:end].tolist()
    if len(ids) <= HEAD_TOKENS + TAIL_TOKENS:
        return _marked(ids, learned, tokenizer)
    left = f"\n… {len(ids) - HEAD_TOKENS - TAIL_TOKENS} tokens …\n"
    head = _marked(ids[:HEAD_TOKENS], learned[:HEAD_TOKENS], tokenizer)
    return head + left + _marked(ids[-TAIL_TOKENS:], learned[-TAIL_TOKENS:], tokenizer)


def _marked(ids: list[int], learned: np.ndarray, tokenizer: Tokenizer) -> str:
    edges = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(ids)]
    parts = []
    for begin, end in itertools.pairwise(edges):
        text = printable(tokenizer.decode(ids[begin:end], skip_special=False))
        if not learned[begin]:
            parts.append(styled(text, "quiet", sys.stdout))
        elif has_colours(sys.stdout):
            parts.append(styled(text, "learned", sys.stdout))
        else:
            parts.append(f"{BEGIN}{text}{END}")
    return "".join(parts)


def printable(text: str) -> str:
    """Escapes characters that a terminal would act on, except line ends."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
