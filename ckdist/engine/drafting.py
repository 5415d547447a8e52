"""Drafts: guessed next tokens whose rows a decode step computes too, so that it can give several tokens.

Each row is drawn as it would be without drafts, one after another, as long as the drawn token is the drafted one. A row
has the same bits in any batch, so the answer has the same bits, too. Nothing is drawn ahead, so neither sampling nor
grammars ever go back. Only the cache and the states do (`Scheduler.keep`).
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckdist.config.draft_config import DraftFlags
from ckdist.engine.acceptance import Acceptance
from ckdist.engine.answer_archive import AnswerArchive
from ckdist.engine.draft_gain import DraftGain, Option
from ckdist.engine.drafter import PRIORS, Drafter
from ckdist.engine.loaded_model import Model
from ckdist.engine.row_costs import RowCosts
from ckdist.engine.sampler import Sampler
from ckdist.engine.sequence import Sequence
from ckdist.engine.step_builder import SequenceChunk, agreed_drafts
from ckdist.errors import RequestError
from ckdist.program.step_batch import BLOCK_TOKENS, NO_SLOT

if TYPE_CHECKING:
    from ckdist.engine.block_pool import BlockPool
    from ckdist.engine.model_drafter import ModelDrafter

MOST_SEQUENCES = 16  # a wider step drafts nothing
IDLE_STEPS = 8  # steps with sequences that never draft, before another sequence is looked for
LEARN_TOKENS = 8  # drafted tokens before a draft model's prompts count as a cost
REST_STEPS = 7  # after a step in which the draft model does not pay, since it takes time to find that
# A draft model that does not pay is tried again after this number of refusals. One that seems too slow for that is
# measured again, after twice as many each time.
REFUSALS, MOST_REFUSALS = 16, 64

Guess = tuple[list[int], list[float]]  # tokens, and for each the probability that it and all before it are right


class Drafting:
    """The drafters of all running sequences, and the choice of the tokens to verify.

    Args:
        kind: One of SPECS, for requests that name none. auto: the better one of suffix and a draft model.
            mtp: `model` is the model's own layer.
        most: Most drafted tokens of one sequence in a step.
        least: A sequence with fewer guessed tokens drafts nothing.
        by_gain: Let the measured seconds choose the number of tokens. Else it is `most`.
        model: The draft model, or None.
    """

    def __init__(
        self,
        kind: str = "auto",
        most: int = 16,
        least: int = 1,
        by_gain: bool = True,
        model: "ModelDrafter | None" = None,
    ) -> None:
        self.kind, self._most, self._least, self._by_gain = kind, most, least, by_gain
        self.model = model
        self._idle = 0, 0  # the next steps that draft nothing if they have that number of sequences
        self._rest = 0  # steps before the draft model is thought of again
        self._spent = 0.0  # seconds of the draft model before the step under way
        self._without_model, self._retry = 0, MOST_REFUSALS  # refusals since it drafted last; and those that are enough
        self._archive = AnswerArchive()
        self._acceptance = Acceptance(PRIORS)
        self.gain = DraftGain()
        self._expected: deque[float] = deque()  # accepted tokens of the steps with drafts under way

    def kind_of(self, sequence: Sequence) -> str:
        """The drafter of a sequence: off, ngram, suffix, model, or auto for the better one of the last two."""
        kind = sequence.params.spec or self.kind
        if sequence.source is not None or sequence.pooling is not None:
            return "off"
        if kind == "mtp":
            return "model"
        return "suffix" if kind == "auto" and self.model is None else kind

    def check(self, sequence: Sequence) -> None:
        """Raises RequestError if the request names a drafter that is not there."""
        spec = sequence.params.spec
        if spec in ("model", "mtp") and (self.model is None or spec == "mtp" != self.kind):
            needed, flag = ("layers", "--spec mtp") if spec == "mtp" else ("a draft model", "--model-draft")
            raise RequestError(
                f"spec {spec} needs {needed} to draft, and there is none: start with {flag}, or use suffix", "spec"
            )

    def add(self, chunks: list[SequenceChunk], tokens: int, outputs: int, pool: "BlockPool") -> list[SequenceChunk]:
        """Returns the chunks of a decode step with drafted tokens.

        Args:
            tokens: Most tokens of the step.
            outputs: Most rows of logits.
        """
        count, (idle, idle_count) = len(chunks), self._idle
        if count > MOST_SEQUENCES:
            return chunks
        if idle > 0 and count == idle_count:
            self._idle = idle - 1, count
            return chunks
        room = min(tokens, outputs) - count
        guesses = [self._guess(chunk) for chunk in chunks]
        spent = self._spent = 0.0 if self.model is None else self._ask_model(self.model, chunks, guesses)
        if not any(tokens for tokens, _ in guesses):
            if self.model is None:
                waits = [chunk.sequence.drafter.waits for chunk in chunks if chunk.sequence.drafter is not None]
                self._idle = min(waits, default=IDLE_STEPS) - 1, count
            return chunks
        # (probability, place of the sequence)
        offers = [(part, place) for place, (_, parts) in enumerate(guesses) for part in parts]
        offers.sort(key=lambda offer: -offer[0])  # stable: a token stays after those before it
        parts = [part for part, _ in offers[:room]]
        chosen = self.gain.choose(count, parts, spent) if self._by_gain else len(parts)
        if not chosen:
            return chunks
        taken = [0] * count
        for _, place in offers[:chosen]:
            taken[place] += 1
        rows, added = 0, list[SequenceChunk]()
        for chunk, (guessed, _), number in zip(chunks, guesses, taken, strict=True):
            drafts = self._within_blocks(chunk, guessed[:number], pool)
            added.append(_with_drafts(chunk, drafts, rows))
            rows += added[-1].rows
        if any(chunk.drafts for chunk in added):
            self._expected.append(sum(parts[:chosen]))
        return added

    def _guess(self, chunk: SequenceChunk) -> Guess:
        """Tokens from earlier text."""
        sequence, drafter = chunk.sequence, chunk.sequence.drafter
        if drafter is None:
            kind = self.kind_of(sequence)
            if kind in ("off", "model"):
                return [], []
            archive = None if kind == "ngram" else self._archive.find(sequence.tenant)
            drafter = sequence.drafter = Drafter(sequence, self._acceptance, archive)
        if not drafter.follow():
            return [], []
        most = self._most_of(chunk)
        return self._allowed(sequence, *drafter.guess(most)) if most else ([], [])

    def _most_of(self, chunk: SequenceChunk) -> int:
        """Most drafted tokens of a sequence in a step."""
        sequence = chunk.sequence
        most = min(sequence.params.draft_max or self._most, self._most, len(sequence.tokens) - sequence.length - 1)
        own = sequence.state_slots
        if own is not None:
            if chunk.states.save != NO_SLOT:
                return 0
            # A step that fills a block has no drafts, so that it leaves its snapshot.
            most = min(most, -(chunk.first + 1) % BLOCK_TOKENS - 1)
        return most if most >= max(1, self._least_of(sequence)) else 0

    def _least_of(self, sequence: Sequence) -> int:
        """Fewer drafted tokens of a sequence are not verified."""
        own = sequence.params.draft_min
        return self._least if own is None else own

    def _allowed(self, sequence: Sequence, tokens: list[int], parts: list[float]) -> Guess:
        """The tokens that the sequence's grammar allows, if they are enough."""
        state = sequence.sampling_state
        if state is not None and state.constraint is not None and tokens:
            allowed = state.constraint.allowed_of(tokens)
            tokens, parts = tokens[:allowed], parts[:allowed]
        return (tokens, parts) if len(tokens) >= self._least_of(sequence) else ([], [])

    def _ask_model(self, model: "ModelDrafter", chunks: list[SequenceChunk], guesses: list[Guess]) -> float:
        """Replaces guesses by those of the draft model, if these are expected to gain more. Returns its seconds."""
        if self._rest > 0 or (self._by_gain and self.gain.is_due):
            self._rest = max(0, self._rest - 1)
            return 0.0
        most = {n: self._most_of(chunk) for n, chunk in enumerate(chunks) if self._may_ask(model, chunk, guesses[n])}
        places = [place for place, tokens in most.items() if tokens]
        charged, seconds = model.charged, model.seconds
        pays = bool(places) and (not self._by_gain or self._pays(model, chunks, guesses, places))
        self._rest = REST_STEPS * bool(places)
        if pays or (places and self._tries(model, len(chunks), len(places))):
            self._without_model = 0
            is_free = not self._by_gain or (pays and model.drafted < LEARN_TOKENS)
            for place in places:
                if model.read(chunks[place].sequence, is_free):
                    self._rest = 0
                    if self._by_gain:
                        break  # one prompt is read in a step, so that no step takes long
            places = [place for place in places if model.is_ready(chunks[place].sequence)]
            self._rest *= not places
            sequences = [chunks[place].sequence for place in places]
            drafts = self._draft(model, len(chunks), sequences, [most[place] for place in places]) if places else []
            for place, sequence, draft in zip(places, sequences, drafts, strict=True):
                allowed = self._allowed(sequence, *draft)
                if sum(allowed[1]) > sum(guesses[place][1]):
                    guesses[place] = allowed
        self.gain.spend(model.seconds - seconds)
        return model.charged - charged

    def _draft(self, model: "ModelDrafter", count: int, sequences: list[Sequence], most: list[int]) -> list[Guess]:
        """Drafts tokens one after another, as long as one more is expected to gain.

        Args:
            count: Sequences of the step.
            most: Most tokens of each sequence.
        """
        before = model.charged
        drafts = model.begin_draft(sequences)
        going = list(range(len(sequences)))
        while True:
            going = [n for n in going if len(drafts[n][0]) < most[n] and drafts[n][1]]
            now = Option(sum(sum(p) for _, p in drafts), sum(len(t) for t, _ in drafts), model.charged - before)
            more = sum(drafts[n][1][-1] * model.rate(sequences[n]) for n in going)
            seconds = now.spent + model.costs.cost(len(going))
            then = Option(now.accepted + more, now.rows + len(going), seconds)
            if not going or (self._by_gain and not self.gain.is_better(count, then, now)):
                return drafts
            going = model.draft(sequences, drafts, going)

    def _may_ask(self, model: "ModelDrafter", chunk: SequenceChunk, guess: Guess) -> bool:
        """True if the draft model is expected to guess more of a sequence than earlier text."""
        sequence = chunk.sequence
        kind = self.kind_of(sequence)
        if kind not in ("auto", "model"):
            return False
        model.see(sequence)
        rate = model.rate(sequence)
        return kind == "model" or sum(guess[1]) < rate + rate**2

    def _pays(
        self, model: "ModelDrafter", chunks: list[SequenceChunk], guesses: list[Guess], places: list[int]
    ) -> bool:
        """True if the draft model is expected to gain more than earlier text."""
        count, gain = len(chunks), self.gain
        plain = gain.costs.cost(count)
        if not plain:
            return False
        gain.lose(count, model.measure(len(places), plain))
        each = model.costs.cost(len(places))
        rates = [model.rate(chunks[place].sequence) for place in places]
        depths = range(1, self._most + 1)
        options = [Option(sum(_sum(rate, n) for rate in rates), n * len(places), n * each) for n in depths]
        speed = gain.best(count, options)[1]
        parts = sorted((part for _, parts in guesses for part in parts), reverse=True)
        text = gain.best(count, [Option(sum(parts[:n]), n) for n in range(1, len(parts) + 1)])[1]
        return speed > text

    def _tries(self, model: "ModelDrafter", count: int, places: int) -> bool:
        """True if a draft model that does not pay is to be tried once more.

        Args:
            count: Sequences of the step.
            places: Those of them that the draft model may follow.
        """
        self._without_model += 1
        if self._without_model > self._retry:  # it seems too slow; maybe something disturbed it
            self._without_model, self._retry = 0, 2 * self._retry
            model.costs = RowCosts()
            return False
        learns = model.drafted < LEARN_TOKENS
        return (learns or self._without_model > REFUSALS) and self.gain.allows(count, model.costs.cost(places))

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
        if self.model is None and not self._expected and self.gain.skips(len(chunks)):
            return
        spent, self._spent = self._spent, 0.0
        drafted = accepted = 0
        for chunk in chunks:
            agreed = agreed_drafts(chunk) if chunk.drafts else 0
            if self.model is not None:
                self.model.take(chunk, agreed)
            if chunk.drafts:
                drafted, accepted = drafted + len(chunk.drafts), accepted + agreed
                keep(chunk, agreed)
        if drafted:
            self.gain.observe(len(chunks), drafted, accepted, self._expected.popleft(), seconds, spent)
        elif all(chunk.decodes for chunk in chunks):
            self.gain.observe_plain(len(chunks), seconds, spent)
        if self.model is not None:
            plain = self.gain.costs.cost(len(chunks))
            saved = plain * (1 + accepted / len(chunks)) - seconds - spent
            self.model.earn(seconds, saved if spent else 0.0, plain)

    def leave(self, sequence: Sequence) -> None:
        """Frees the draft model's part of a sequence that ends."""
        if self.model is not None:
            self.model.leave(sequence)

    def archive(self, sequence: Sequence) -> None:
        """Adds the answer of a sequence that ends to its tenant's answers."""
        if sequence.tenant is not None and self.kind_of(sequence) in ("suffix", "auto") and len(sequence.output):
            self._archive.add(sequence.tenant, sequence.output)

    def stats(self) -> dict[str, float]:
        """Counters for /metrics."""
        gain = self.gain
        return {
            "draft_steps_total": gain.steps,
            "draft_tokens_total": gain.drafted,
            "draft_accepted_tokens_total": gain.accepted,
            "draft_seconds_total": gain.seconds,
            "draft_predicted_gain": 1 + gain.predicted / gain.seconds if gain.steps else 1.0,
            "draft_measured_gain": 1 + gain.measured / gain.seconds if gain.steps else 1.0,
            **(self.model.stats() if self.model is not None else {}),
        }


def make_drafting(drafts: DraftFlags, model: Model) -> Drafting:
    """The drafts of an engine over a loaded model."""
    if model.draft is None:
        return Drafting(drafts.spec, drafts.draft_max, drafts.draft_min)
    own, target = model.draft.executable, model.executable
    args = own, Sampler(own.vocab_size, own.worker.pool), target.vocab_size
    if model.draft.spec.predicts:
        from ckdist.engine.layer_drafter import LayerDrafter

        drafter: ModelDrafter = LayerDrafter(*args, target)
    else:
        from ckdist.engine import model_drafter

        drafter = model_drafter.ModelDrafter(*args)
    drafter.least = drafts.draft_p_min
    return Drafting(drafts.spec, drafts.draft_max, drafts.draft_min, model=drafter)


def _sum(rate: float, count: int) -> float:
    """Expected right tokens of `count`, each with probability `rate` if those before it are right."""
    return sum(rate**n for n in range(1, count + 1))


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
