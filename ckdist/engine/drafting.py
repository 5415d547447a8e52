"""Drafts: guessed next tokens whose rows a decode step computes too, so that it can give several tokens.

Each row is drawn as it would be without drafts, one after another, as long as the drawn token is the drafted one. A row
has the same bits in any batch, so the answer has the same bits, too. Nothing is drawn ahead, so neither sampling nor
grammars ever go back. Only the cache and the states do (`Scheduler.keep`).
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckdist.engine.answer_archive import AnswerArchive
from ckdist.engine.draft_gain import DraftGain
from ckdist.engine.drafter import Acceptance, Drafter
from ckdist.engine.sequence import Sequence
from ckdist.engine.step_builder import SequenceChunk, agreed_drafts
from ckdist.program.step_batch import BLOCK_TOKENS, NO_SLOT

if TYPE_CHECKING:
    from ckdist.engine.block_pool import BlockPool

DRAFTERS = "ngram", "suffix"
MOST_SEQUENCES = 16  # a wider step drafts nothing


class Drafting:
    """The drafters of all running sequences, and the choice of the tokens to verify.

    Args:
        kind: auto, ngram, suffix or off, for requests that name none. auto: suffix.
        most: Most drafted tokens of one sequence in a step.
        least: A sequence with fewer guessed tokens drafts nothing.
        by_gain: Let the measured seconds choose the number of tokens. Else it is `most`.
    """

    def __init__(self, kind: str = "auto", most: int = 16, least: int = 1, by_gain: bool = True) -> None:
        self.kind, self._most, self._least, self._by_gain = kind, most, least, by_gain
        self._archive = AnswerArchive()
        self._acceptance = Acceptance()
        self.gain = DraftGain()
        self._expected: deque[float] = deque()  # accepted tokens of the steps with drafts under way

    def kind_of(self, sequence: Sequence) -> str:
        """The drafter of a sequence: off, ngram or suffix."""
        kind = sequence.params.spec or self.kind
        if sequence.source is not None or sequence.pooling is not None:
            return "off"
        return "suffix" if kind == "auto" else kind

    def add(self, chunks: list[SequenceChunk], tokens: int, outputs: int, pool: "BlockPool") -> list[SequenceChunk]:
        """Returns the chunks of a decode step with drafted tokens.

        Args:
            tokens: Most tokens of the step.
            outputs: Most rows of logits.
        """
        count = len(chunks)
        if count > MOST_SEQUENCES:
            return chunks
        room = min(tokens, outputs) - count
        guesses: list[list[int]] = []
        offers: list[tuple[float, int]] = []  # (probability, place of the sequence)
        for place, chunk in enumerate(chunks):
            guessed, parts = self._guess(chunk)
            guesses.append(guessed)
            offers += [(part, place) for part in parts]
        offers.sort(key=lambda offer: -offer[0])  # stable: a token stays after those before it
        parts = [part for part, _ in offers[:room]]
        chosen = self.gain.choose(count, parts) if self._by_gain else len(parts)
        if not chosen:
            return chunks
        taken = [0] * count
        for _, place in offers[:chosen]:
            taken[place] += 1
        rows, added = 0, list[SequenceChunk]()
        for chunk, guessed, number in zip(chunks, guesses, taken, strict=True):
            drafts = self._within_blocks(chunk, guessed[:number], pool)
            added.append(_with_drafts(chunk, drafts, rows))
            rows += added[-1].rows
        if any(chunk.drafts for chunk in added):
            self._expected.append(sum(parts[:chosen]))
        return added

    def _guess(self, chunk: SequenceChunk) -> tuple[list[int], list[float]]:
        sequence = chunk.sequence
        kind = self.kind_of(sequence)
        if kind == "off":
            return [], []
        drafter = sequence.drafter
        if drafter is None:
            archive = self._archive.find(sequence.tenant) if kind == "suffix" else None
            drafter = sequence.drafter = Drafter(sequence, self._acceptance, archive)
        if not drafter.follow():
            return [], []
        most = min(sequence.params.draft_max or self._most, self._most, len(sequence.tokens) - sequence.length - 1)
        own = sequence.state_slots
        if own is not None:
            if chunk.states.save != NO_SLOT:
                return [], []
            # A step that fills a block has no drafts, so that it leaves its snapshot.
            most = min(most, -(chunk.first + 1) % BLOCK_TOKENS - 1)
        if most < max(1, self._least):
            return [], []
        tokens, parts = drafter.guess(most)
        state = sequence.sampling_state
        if state is not None and state.constraint is not None and tokens:
            allowed = state.constraint.allowed_of(tokens)
            tokens, parts = tokens[:allowed], parts[:allowed]
        return (tokens, parts) if len(tokens) >= self._least else ([], [])

    @staticmethod
    def _within_blocks(chunk: SequenceChunk, drafts: list[int], pool: "BlockPool") -> list[int]:
        """Allocates blocks for drafts if more are free than needed. Returns the drafts that have room."""
        sequence = chunk.sequence
        needed = -(-(sequence.length + len(drafts)) // BLOCK_TOKENS) - sequence.num_blocks
        if needed > 0 and pool.available > MOST_SEQUENCES + needed:
            begin = sequence.num_blocks
            sequence.num_blocks += needed
            sequence.block_table[begin : begin + needed] = pool.allocate(needed)
        return drafts[: sequence.num_blocks * BLOCK_TOKENS - sequence.length]

    def end(self, chunks: list[SequenceChunk], keep: Callable[[SequenceChunk, int], None], seconds: float) -> None:
        """Ends a collected step.

        Args:
            keep: Takes each chunk with drafts, and how many of them were drawn.
            seconds: Measured time of the step.
        """
        drafted = accepted = 0
        for chunk in chunks:
            if chunk.drafts:
                agreed = agreed_drafts(chunk)
                drafted, accepted = drafted + len(chunk.drafts), accepted + agreed
                keep(chunk, agreed)
        if drafted:
            self.gain.observe(len(chunks), drafted, accepted, self._expected.popleft(), seconds)
        elif all(chunk.decodes for chunk in chunks):
            self.gain.observe_plain(len(chunks), seconds)

    def archive(self, sequence: Sequence) -> None:
        """Adds the answer of a sequence that ends to its tenant's answers."""
        if sequence.tenant is not None and self.kind_of(sequence) == "suffix" and len(sequence.output):
            self._archive.add(sequence.tenant, sequence.output)

    def stats(self) -> dict[str, float]:
        """Counters for /metrics."""
        gain = self.gain
        return {
            "draft_steps_total": gain.steps,
            "draft_tokens_total": gain.drafted,
            "draft_accepted_tokens_total": gain.accepted,
            "draft_seconds_total": gain.seconds,
            "draft_predicted_gain": 1 + gain.predicted / gain.seconds if gain.seconds else 1.0,
            "draft_measured_gain": 1 + gain.measured / gain.seconds if gain.seconds else 1.0,
        }


def _with_drafts(chunk: SequenceChunk, drafts: list[int], row: int) -> SequenceChunk:
    """The chunk with these drafts, and its first row of logits. Writes them after the sequence's tokens."""
    sequence = chunk.sequence
    if not drafts or (sequence.state_slots is not None and not sequence.state_slots.can_draft):
        return chunk._replace(row=row)
    length = sequence.length
    sequence.tokens[length : length + len(drafts)] = drafts
    own = sequence.state_slots
    states = chunk.states if own is None else own.draft_row(chunk.first)
    rows = 1 + len(drafts)
    return chunk._replace(tokens=rows, row=row, rows=rows, states=states, drafts=tuple(drafts))
