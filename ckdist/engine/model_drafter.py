"""Drafts of a small model. Its cache follows the sequences; its tokens change no answer, since they are verified."""

import time
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from ckdist.engine.acceptance import Acceptance
from ckdist.engine.block_pool import ROOT, BlockPool
from ckdist.engine.row_costs import RowCosts
from ckdist.engine.sampler import Sampler
from ckdist.engine.sequence import Sequence
from ckdist.engine.step_builder import SequenceChunk
from ckdist.program.executable import Executable
from ckdist.program.step_batch import BLOCK_TOKENS, Batch

# The draft model's probability of its token, by the classes of `Acceptance`, and their parts before any was seen.
CLASSES = 0.3, 0.5, 0.7, 0.9, 0.97
PRIORS = 0.2, 0.4, 0.6, 0.8, 0.9, 0.95
RATE_PRIOR = 0.6  # part of all tokens that are right, before any was seen
FADES = 0.98  # weight of all earlier tokens against the last one: several are multiplied, so they must be exact
LEAST_PART = 0.1  # a token is not drafted if it is right with a smaller probability
BEHIND = 8  # tokens that a sequence may be ahead of the draft model, and read with its next draft
RATE_MEMORY = 0.8  # weight of all earlier prompts in the seconds of a token
READ_SHARE = 0.001  # of all measured seconds, for prompts; at most that part of READ_STEPS plain steps at once
READ_STEPS = 200
SAVED_SHARE = 0.5  # of the seconds that drafts save, for prompts
MOST_CREDIT = 256  # plain steps


Guess = tuple[list[int], list[float]]  # tokens, and for each the probability that it and all before it are right


@dataclass
class Follower:
    """A sequence as the draft model has it: the tokens [0, end) are in its cache."""

    end: int
    blocks: list[int]
    acceptance: Acceptance
    rate: Acceptance
    offset: int = 0  # the first token in the cache
    base: int = 0  # place of the first guess
    guesses: list[int] = field(default_factory=list[int])
    classes: list[int] = field(default_factory=list[int])
    least: float = 0.0  # probability below which a draft stops

    def see(self, sequence: Sequence) -> None:
        """Compares the last guesses with the tokens that came, and takes the wrong ones back."""
        agreed = 0
        for token, place in zip(self.guesses, self.classes, strict=True):
            if self.base + agreed >= sequence.length:
                break
            right = int(sequence.tokens[self.base + agreed]) == token
            self.acceptance.count(place, right)
            self.rate.count(0, right)
            if not right:
                break
            agreed += 1
        if self.guesses:
            self.end = min(self.end, self.base + agreed)
            self.guesses, self.classes = [], []
        self.end = min(self.end, sequence.length - 1)


class ModelDrafter:
    """Runs a small model on all ranks, between the steps of the large one.

    Args:
        executable: The small model's. No step of another model is under way while it runs.
        sampler: Draws from the small model's logits.
        most_token: Drafted tokens are less than this.

    Attributes:
        costs: Measured seconds of its steps with one token of each sequence.
        read_tokens: Tokens of prompts that it has read.
        seconds: All its time.
        charged: The time of drafted tokens. A disturbed step counts less.
        least: Probability below which it stops, for requests that give none.
    """

    def __init__(self, executable: Executable, sampler: Sampler, most_token: int) -> None:
        self.executable, self._sampler, self._most_token = executable, sampler, most_token
        self.costs = RowCosts()
        self.read_tokens = self.drafted = 0
        self.seconds = self.charged = 0.0
        self.least = 0.0
        self._read_each = 0.0  # seconds of a token of a prompt
        self._pool = BlockPool(executable.num_blocks)
        self._limit = min(executable.context_length, executable.num_blocks * BLOCK_TOKENS)
        self._followers: dict[Hashable, Follower] = {}
        self._acceptance, self._rate = Acceptance(PRIORS, FADES), Acceptance((RATE_PRIOR,), FADES)
        self._credit = 0.0  # seconds that prompts may take

    def earn(self, seconds: float, saved: float, plain: float) -> None:
        """Takes the seconds of a step, and those that it saved. They pay for prompts.

        Args:
            plain: Seconds of a step without drafts.
        """
        most = max(self._credit, MOST_CREDIT * plain)
        share = READ_SHARE * seconds if self._credit < READ_SHARE * READ_STEPS * plain else 0.0
        self._credit = min(self._credit + share + max(0.0, SAVED_SHARE * saved), most)

    def see(self, sequence: Sequence) -> Follower | None:
        """The draft model's part of a sequence, which has seen its last tokens. None: it has no part yet."""
        follower = self._followers.get(sequence.id)
        if follower is not None:
            follower.see(sequence)
        return follower

    def rate(self, sequence: Sequence) -> float:
        """The part of the drafted tokens of a sequence that are right."""
        follower = self._followers.get(sequence.id)
        return (self._rate if follower is None else follower.rate).part(0)

    def measure(self, rows: int, plain: float) -> float:
        """Measures steps with one token of each of `rows` sequences, unless narrower and wider ones were measured.

        One measurement is enough if it takes longer than a step without drafts, `plain`. Returns the seconds of all.
        """
        if self.costs.spans(rows) or self._pool.available < rows:
            return 0.0
        blocks, before = self._pool.allocate(rows), self.seconds
        while not self.costs.is_known(rows):
            scratch = [Follower(0, [block], self._acceptance, self._rate) for block in blocks]
            seconds = self._guess(
                [(follower, np.zeros(1, np.int32)) for follower in scratch], [([], []) for _ in blocks]
            )
            if seconds > plain:
                self.costs.measure(rows, seconds)
        self._pool.release(blocks)
        return self.seconds - before

    def read(self, sequence: Sequence, is_free: bool) -> bool:
        """Reads tokens before the last ones, at most those of a step. Returns False if it reads none.

        A small part of all time, and a part of the time that drafts have saved, pay for that.

        Args:
            is_free: It need not be paid for, if nothing of this sequence was drafted yet.
        """
        follower = self._followers.get(sequence.id) or self._begin(sequence)
        count, is_free = sequence.length - 1 - follower.end, is_free and not follower.base
        if count < BEHIND or not (is_free or count * self._read_each <= self._credit):
            return False
        if not self._extend(follower, sequence):
            return False
        count = min(count, self.executable.max_tokens)
        begin = time.perf_counter()
        self._run([(follower, sequence.tokens[follower.end : follower.end + count])], False)
        seconds = time.perf_counter() - begin
        each = seconds / count
        self._read_each = RATE_MEMORY * self._read_each + (1 - RATE_MEMORY) * each if self._read_each else each
        self.read_tokens, self.seconds = self.read_tokens + count, self.seconds + seconds
        self._credit -= 0.0 if is_free else seconds
        return True

    def _begin(self, sequence: Sequence) -> Follower:
        blocks = list[int]()
        if sequence.tenant is not None:
            limit = min(sequence.length - 1, self._limit)
            blocks = self._pool.match(sequence.tokens[: sequence.length], limit, sequence.tenant)
            self._pool.hold(blocks)
        rates = self._acceptance.of_sequence(), self._rate.of_sequence()
        follower = self._followers[sequence.id] = Follower(len(blocks) * BLOCK_TOKENS, blocks, *rates)
        return follower

    def is_ready(self, sequence: Sequence) -> bool:
        """True if a draft may follow the sequence's tokens at once."""
        follower = self._followers.get(sequence.id)
        return follower is not None and sequence.length - 1 - follower.end < BEHIND and self._extend(follower, sequence)

    def _extend(self, follower: Follower, sequence: Sequence, drafted: int = 0) -> bool:
        """Allocates blocks for the tokens of a sequence and its drafted ones.

        Returns False if there are too few blocks, or if a token is not the small model's.
        """
        length = sequence.length + drafted - follower.offset
        needed = -(-length // BLOCK_TOKENS) - len(follower.blocks)
        if needed > self._pool.available or length > self._limit:
            return False
        new = sequence.tokens[follower.end : sequence.length]
        if len(new) and int(new.max()) >= self.executable.vocab_size:  # rows that no token of the tokenizer has
            return False
        if needed > 0:
            follower.blocks += self._pool.allocate(needed)
        return True

    def begin_draft(self, sequences: list[Sequence]) -> list[Guess]:
        """Drafts the next token of sequences that are ready. Returns drafts as `draft` does."""
        items = list[tuple[Follower, np.ndarray]]()
        drafts = list[Guess]()
        for sequence in sequences:
            follower = self._followers[sequence.id]
            follower.base, follower.guesses, follower.classes = sequence.length, [], []
            least = sequence.params.draft_p_min
            follower.least = self.least if least is None else least
            items.append((follower, sequence.tokens[follower.end : sequence.length]))
            drafts.append(([], []))
        self._draft_step(items, drafts)
        return drafts

    def draft(self, sequences: list[Sequence], drafts: list[Guess], places: list[int]) -> list[int]:
        """Drafts one more token of some sequences, after those in `drafts`.

        Args:
            drafts: By sequence: its drafted tokens, and for each the probability that it and all before it are right.
            places: The sequences.

        Returns:
            The places whose drafts may go on.
        """
        going = list[int]()
        items = list[tuple[Follower, np.ndarray]]()
        for place in places:
            sequence, (tokens, parts) = sequences[place], drafts[place]
            follower = self._followers[sequence.id]
            is_whole = follower.end == follower.base + len(tokens) - 1  # no token was left out
            if is_whole and parts and parts[-1] >= LEAST_PART and self._extend(follower, sequence, len(tokens)):
                going.append(place)
                items.append((follower, np.array(tokens[-1:], np.int32)))
        if items:
            self._draft_step(items, [drafts[place] for place in going])
        return going

    def _draft_step(self, items: list[tuple[Follower, np.ndarray]], drafts: list[Guess]) -> None:
        self.charged += self._guess(items, drafts)
        self.drafted += len(items)

    def _guess(self, items: list[tuple[Follower, np.ndarray]], drafts: list[Guess]) -> float:
        """Appends the most likely next token of each sequence to its drafts.

        Returns its seconds, or fewer if it seems that something disturbed it.
        """
        begin = time.perf_counter()
        logits = self._run(items, True)
        # (rows, vocab) -> the most likely token of each row, and its log probability
        samples = self._sampler.logprobs(logits, np.zeros(len(items), np.int32), 1)
        for (follower, _), (tokens, parts), sample in zip(items, drafts, samples, strict=True):
            token, logprob = sample.top[0]
            probability = float(np.exp(logprob))
            if token >= self._most_token or probability < follower.least:  # the vocabulary does not use all rows
                continue
            place = sum(probability >= limit for limit in CLASSES)
            follower.guesses.append(token)
            follower.classes.append(place)
            tokens.append(token)
            parts.append((parts[-1] if parts else 1.0) * follower.acceptance.part(place))
        seconds = time.perf_counter() - begin
        self.seconds += seconds
        return self.costs.measure(len(items), seconds)

    def _run(self, items: list[tuple[Follower, np.ndarray]], wants_logits: bool) -> np.ndarray:
        """Runs one step with the next tokens of some sequences: float32 logits (sequences, vocab) or (0, vocab)."""
        chunks, tables, ends = list[tuple[int, int, int]](), list[int](), list[int]()
        inputs = [self._inputs(follower, tokens) for follower, tokens in items]
        embeddings = [rows for rows in inputs if rows is not None]
        for follower, tokens in items:
            first = follower.end - follower.offset
            blocks = -(-(first + len(tokens)) // BLOCK_TOKENS)
            chunks.append((len(tokens), first, blocks))
            tables += follower.blocks[:blocks]
            ends.append((ends[-1] if ends else -1) + len(tokens))
            follower.end += len(tokens)
        return self.executable.run(
            Batch(
                np.concatenate([tokens for _, tokens in items]).astype(np.int32),
                np.array(chunks, np.int32),
                np.array(tables, np.int32),
                np.array(ends if wants_logits else [], np.int32),
                embeddings=np.concatenate(embeddings) if embeddings else None,
            )
        )

    def _inputs(self, follower: Follower, tokens: np.ndarray) -> np.ndarray | None:  # noqa: ARG002
        """The hidden states that a layer reads with the tokens, float32 (tokens, hidden). A model reads none."""
        return None

    def take(self, chunk: SequenceChunk, agreed: int) -> None:
        """Takes a sequence's part of a step that was collected, and how many of its drafts were right."""

    def leave(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence. Its tenant's later sequences may begin with them."""
        follower = self._followers.pop(sequence.id, None)
        if follower is None:
            return
        follower.see(sequence)
        full = follower.end // BLOCK_TOKENS
        if full and sequence.tenant is not None:
            tokens = sequence.tokens[: full * BLOCK_TOKENS].tobytes()
            follower.blocks[:full] = self._pool.share(follower.blocks[:full], ROOT, tokens, sequence.tenant)
        self._pool.release(follower.blocks, sequence.length)

    def stats(self) -> dict[str, float]:
        """Counters for /metrics."""
        return {
            "draft_model_tokens_total": self.drafted,
            "draft_model_read_tokens_total": self.read_tokens,
            "draft_model_seconds_total": self.seconds,
        }
