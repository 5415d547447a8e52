"""Greedy continuations of held-out prompts by the weights in training. Every token is a pass over the whole text."""

from collections.abc import Iterator

import numpy as np

from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.batch import PackedBatch
from ckdist.train.config import TrainConfig
from ckdist.train.data.token_rows import Rows
from ckdist.train.native_executable import NativeExecutable

TOKENS = 48  # of a continuation, at most
PROMPT_OF_TEXT = 24  # tokens of a text that are its prompt
SHOWN = 60  # last characters of a prompt that are shown


def continued(executable: NativeExecutable, rows: Rows, tokenizer: Tokenizer, config: TrainConfig) -> Iterator[str]:
    """Yields a line for each of the first prompts. A collective call of the ranks that share the weights."""
    for document in rows.documents[: config.samples].tolist():
        prompt = _prompt(rows, document)[: config.max_length - 1]
        room = min(TOKENS, config.max_length - len(prompt))
        answer: list[int] = []
        while len(answer) < room and not (answer and answer[-1] in tokenizer.eos_token_ids):
            answer.append(_next(executable, [*prompt, *answer], config))
        before = tokenizer.decode(prompt, skip_special=False)[-SHOWN:]
        yield f"{before!r} → {tokenizer.decode(answer, skip_special=False)!r}"


def _prompt(rows: Rows, document: int) -> list[int]:
    """The tokens before the first learned one; of a text, its first tokens."""
    begin, end = int(rows.cache.starts[document]), int(rows.cache.starts[document + 1])
    learned = None if rows.cache.learned is None else np.asarray(rows.cache.learned[begin:end])
    size = PROMPT_OF_TEXT if learned is None or learned.all() else int(np.argmax(learned > 0))
    return rows.cache.tokens[begin : begin + max(1, min(size, end - begin))].tolist()


def _next(executable: NativeExecutable, ids: list[int], config: TrainConfig) -> int:
    """The most probable next token."""
    targets = np.full(len(ids), -1, np.int32)
    targets[-1] = 0  # any: only such tokens have logits
    choices, teacher = executable.choices, None
    if choices and config.teacher_file:  # any, too
        logprobs = np.full((len(ids), choices), -np.log(choices), np.float32)
        teacher = np.tile(np.arange(choices, dtype=np.int32), (len(ids), 1)), logprobs
    starts = np.array([0, len(ids)], np.int32)
    batch = PackedBatch(np.array(ids, np.int32), targets, starts, teacher=teacher)
    found = executable.best_tokens(batch)[-1:].copy()
    if executable.gathers and executable.ranks.data is not None:  # all replicas make the same passes
        executable.ranks.data.broadcast(found)
    return int(found[0])
