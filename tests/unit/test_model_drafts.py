"""A small model that drafts changes no token, follows what is drawn, and gives its blocks back."""

import random
import re

import numpy as np
import pytest
import tokenizers

from ckdist.engine.draft_model import check_vocabularies
from ckdist.engine.drafting import Drafting
from ckdist.engine.engine import Engine
from ckdist.engine.grammars import Grammars
from ckdist.engine.load_model import BUNDLED
from ckdist.engine.model_drafter import ModelDrafter
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import ConfigError, RequestError
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.support.paged_executable import PagedExecutable
from tests.unit.test_drafts import answers, small
from tests.unit.test_engine import greedy


class Doubtful(PagedExecutable):
    """Knows the large model's logits, but some rows are wrong."""

    def __init__(self, wrong: float, **sizes) -> None:
        super().__init__(**sizes)
        self.wrong, self.draw = wrong, random.Random(0)

    def run(self, batch):
        logits = super().run(batch).copy()
        for row in logits:
            if self.draw.random() < self.wrong:
                row[self.draw.randrange(len(row))] = 9.0
        return logits


def drafting_of(wrong: float, by_gain: bool = False, most: int = 6, **sizes) -> Drafting:
    model = ModelDrafter(Doubtful(wrong, **sizes), Sampler(50), 50)
    return Drafting("model", most, by_gain=by_gain, model=model)


@pytest.mark.parametrize("seed", range(4))
def test_no_answer_differs_with_a_draft_model(seed):
    """With preemptions, states, and a draft model that has blocks for some of the sequences."""
    draw = random.Random(seed)
    prefix = [draw.randrange(50) for _ in range(40)]
    requests = []
    for i in range(8):
        prompt = [*prefix[: draw.randrange(41)], draw.randrange(50)]
        fields = draw.choice([{}, {"logprobs": 2}, {"temperature": 1.0}, {"repetition_penalty": 1.3}, {"spec": "off"}])
        fields = {"temperature": 0.0, "seed": i, "stop_token_ids": (draw.randrange(50),), **fields}
        requests.append((prompt, SamplingParams(draw.randint(1, 60), **fields)))
    slots = 12 * (seed % 2)
    plain = answers(Engine(small(random.Random(seed), slots, 1), Sampler(50), {7}), requests)
    drafting = drafting_of(0.2, num_blocks=draw.randint(8, 40), context_length=draw.choice([70, 200]))
    drafting.kind = draw.choice(["model", "auto"])
    engine = Engine(small(random.Random(seed), slots, 1), Sampler(50), {7}, make_drafting=lambda: drafting)
    assert answers(engine, requests) == plain
    model = drafting.model
    assert drafting.gain.accepted > 20 and model._pool.available == model._pool.num_blocks and not model._followers


def test_the_cache_of_a_draft_model_is_right_after_refused_drafts_and_is_used_again():
    drafting = drafting_of(0.0)
    engine = Engine(PagedExecutable(), Sampler(50), make_drafting=lambda: drafting)
    prompts = [list(range(begin, begin + 20)) for begin in (0, 10, 20)]
    answers(engine, [(prompts[0], greedy(60)), (prompts[1], SamplingParams(60, temperature=1.0, seed=1))])
    gain, own = drafting.gain, drafting.model.executable
    assert 40 < gain.accepted < gain.drafted
    assert drafting.model._pool.cached > 6  # both left their blocks
    wrong, accepted, read = gain.drafted - gain.accepted, gain.accepted, drafting.model.read_tokens
    answers(engine, [(prompts[0], greedy(60))])
    assert gain.drafted - gain.accepted == wrong and gain.accepted > accepted + 45
    assert drafting.model.read_tokens - read < 16, "blocks of the first answer were not used again"
    assert len(own.batches) < 200


class Clock:
    """Each step of an executable takes some of this time, by its tokens."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr("time.monotonic_ns", lambda: int(self.now * 1e9))

    def timed(self, executable, seconds) -> None:
        """`seconds`: of a step, by its tokens."""
        run = executable.run

        def measured(batch):
            self.now += seconds(len(batch.token_ids))
            return run(batch)

        executable.run = measured


@pytest.mark.parametrize(
    "wrong, seconds, least, most",
    [(0.0, 0.1, 1.6, 4.0), (0.3, 0.1, 1.1, 4.0), (0.95, 0.1, 0.99, 1.01), (0.0, 2.0, 0.99, 1.01)],
)
def test_a_draft_model_is_used_as_far_as_it_pays_with_its_own_seconds(monkeypatch, wrong, seconds, least, most):
    """The time of long prompts that it reads counts too."""
    took = []
    for has_drafts in False, True:
        clock, executable = Clock(monkeypatch), PagedExecutable()
        clock.timed(executable, lambda rows: 1 + 0.02 * rows)
        drafting = drafting_of(wrong, by_gain=True, most=16)
        clock.timed(drafting.model.executable, lambda rows: seconds * (1 + 0.01 * rows))
        engine = Engine(executable, Sampler(50), make_drafting=lambda d=drafting: d if has_drafts else None)
        draw = np.random.default_rng(1)
        for _ in range(4):
            answers(engine, [(draw.integers(0, 50, 300).tolist(), greedy(150))])
        took.append(clock.now)
    assert least <= took[0] / took[1] <= most
    if wrong in (0.0, 0.3) and seconds < 1:
        stats = drafting.stats()
        assert stats["draft_measured_gain"] == pytest.approx(stats["draft_predicted_gain"], rel=0.15)


class Sure(Doubtful):
    """Is as sure of its wrong tokens as of the right ones."""

    def run(self, batch):
        logits = PagedExecutable.run(self, batch).copy()
        for row in logits:
            wrong = self.draw.random() < self.wrong
            row[self.draw.randrange(len(row)) if wrong else int(row.argmax())] = 99.0
        return logits


def mixture(draw: random.Random, share: float):
    """Rows -> seconds of a step: each of 12 layers reads the experts of its rows, 4 of 64 each.

    `share`: that of the experts in a step with one row, which takes a second.
    """

    def seconds(rows: int) -> float:
        hit = [len({expert for _ in range(rows) for expert in draw.sample(range(64), 4)}) for _ in range(12)]
        return (1 - share + share * sum(hit) / 48) * draw.uniform(0.98, 1.02)

    return seconds


@pytest.mark.parametrize(
    "share, layer, wrong, least",
    [(0.45, 0.085, 0.15, 1.1), (0.45, 0.1, 0.95, 0.99), (0.7, 0.1, 0.3, 0.99), (0.3, 1.5, 0, 0.99)],
)
def test_a_mixture_drafts_as_far_as_it_pays_and_else_loses_a_hundredth_of_200_steps(
    monkeypatch, share, layer, wrong, least
):
    """Each drafted row reads experts of its own. In the last case drafts are right, and slower than the model."""
    clock, executable = Clock(monkeypatch), PagedExecutable(num_blocks=128, context_length=1500)
    clock.timed(executable, mixture(random.Random(1), share))
    model = ModelDrafter(Sure(wrong, num_blocks=128, context_length=1500), Sampler(50), 50)
    clock.timed(model.executable, lambda _: layer)
    drafting = Drafting("model", 8, model=model)
    engine = Engine(executable, Sampler(50), make_drafting=lambda: drafting)
    engine.add("a", [1], greedy(1201))
    engine.step()
    lost, begin = [0.0], clock.now
    while engine.has_work:
        before = clock.now
        tokens = sum(len(output.tokens) for output in engine.step())
        lost.append(lost[-1] + clock.now - before - tokens)
    assert 1200 / (clock.now - begin) > least
    worst = max(lost[min(i + 200, len(lost) - 1)] - before for i, before in enumerate(lost))
    assert worst <= 2, worst
    if least > 1:
        stats = drafting.stats()
        assert stats["draft_measured_gain"] == pytest.approx(stats["draft_predicted_gain"], rel=0.1)


def test_grammars_prune_the_tokens_of_a_draft_model():
    tokenizer = tokenizer_of(BUNDLED)
    vocab, grammars = tokenizer.vocab_size, Grammars(tokenizer, tokenizer.vocab_size)
    grammar = '%llguidance {}\nstart: "The answer is " /[^x]{90}/ "."'
    requests = [([5], SamplingParams(40, seed=seed, temperature=0.0, grammar=grammar, logprobs=0)) for seed in (1, 2)]
    drafting = Drafting("model", 6, by_gain=False)
    drafting.model = ModelDrafter(PagedExecutable(vocab_size=vocab), Sampler(vocab), vocab)
    plain, drafted = (
        answers(
            Engine(PagedExecutable(vocab_size=vocab), Sampler(vocab), {2}, grammars=grammars, make_drafting=make),
            requests,
        )
        for make in (lambda: None, lambda: drafting)
    )
    assert plain == drafted
    assert 10 < drafting.gain.accepted <= drafting.gain.drafted < drafting.model.drafted


def test_a_draft_model_with_fewer_rows_never_reads_a_token_that_it_does_not_have():
    requests = [(list(range(20)), greedy(60)), ([45] * 20, greedy(60))]
    plain = answers(Engine(PagedExecutable(), Sampler(50)), requests)
    model = ModelDrafter(PagedExecutable(vocab_size=40), Sampler(40), 50)
    drafting = Drafting("model", by_gain=False, model=model)
    assert answers(Engine(PagedExecutable(), Sampler(50), make_drafting=lambda: drafting), requests) == plain
    assert model.drafted > 0 and model.executable.cache.max() < 40


def test_a_draft_model_stops_below_a_probability():
    counts = []
    for least in None, 0.999:
        drafting = drafting_of(0.0)
        engine = Engine(PagedExecutable(), Sampler(50), make_drafting=lambda d=drafting: d)
        answers(engine, [(list(range(20)), SamplingParams(40, temperature=0.0, draft_p_min=least))])
        counts.append(drafting.gain.drafted)
    assert counts[0] > 20 and counts[1] == 0


def test_a_request_for_a_draft_model_is_refused_if_there_is_none():
    engine = Engine(PagedExecutable(), Sampler(50), make_drafting=Drafting)
    with pytest.raises(RequestError, match="spec model needs a draft model"):
        engine.add("a", [1], SamplingParams(4, spec="model"))
    assert not engine.has_work


def test_another_vocabulary_is_refused_with_its_first_difference():
    def tokenizer(*words: str) -> Tokenizer:
        vocabulary = {word: number for number, word in enumerate(words)}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
        made = Tokenizer.__new__(Tokenizer)
        object.__setattr__(made, "backend", backend)
        return made

    check_vocabularies(tokenizer("a", "b"), tokenizer("a", "b"), "x")
    for words, message in (
        (("a", "b", "d", "c"), "--model-draft x: its token 2 is 'd', and the model's is 'c'"),
        (("a", "b", "c"), "--model-draft x has 3 tokens in its vocabulary, and the model has 4"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_vocabularies(tokenizer("a", "b", "c", "d"), tokenizer(*words), "x")
