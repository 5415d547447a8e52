"""An answer that one engine began and another continues has the tokens of one that was never interrupted."""

import dataclasses

import pytest

from ckdist.engine.engine import Engine
from ckdist.engine.grammars import Grammars
from ckdist.engine.load_model import BUNDLED
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import RequestError
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.support.paged_executable import PagedExecutable
from tests.unit.test_engine_sampling import STATEFUL

GRAMMAR = '%llguidance {}\nstart: "The answer to everything is " /[a-z]{30}/ ", or perhaps " /[0-9 ]{9}/ "."'


def messages_of(engine: Engine, prompt, params, drawn=()) -> list[tuple[list[int], list | None, str | None]]:
    engine.add(0, prompt, params, drawn=drawn)
    outputs = []
    while engine.has_work:
        outputs += [(output.tokens, output.logprobs, output.finish_reason) for output in engine.step()]
    return outputs


def joined(outputs) -> tuple[list[int], list, str | None]:
    tokens = [token for some, _, _ in outputs for token in some]
    return tokens, [entry for _, entries, _ in outputs for entry in entries or ()], outputs[-1][2]


def check_every_cut(make_engine, prompt, params) -> None:
    whole = messages_of(make_engine(), prompt, params)
    for cut in range(1, len(whole)):
        before = joined(whole[:cut])[0]
        assert joined(messages_of(make_engine(), prompt, params, before)) == joined(whole[cut:]), cut


@pytest.mark.parametrize("fields", [*STATEFUL[2:], {"temperature": 0.0}, {"temperature": 1.0, "logprobs": 2}])
def test_continues_after_any_token(fields):
    params = SamplingParams(max_tokens=24, seed=5, **fields)
    check_every_cut(lambda: Engine(PagedExecutable(), Sampler(50), {7}), [3, 1, 4, 1, 5], params)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_continues_a_grammar_also_within_forced_tokens(logprobs):
    tokenizer = tokenizer_of(BUNDLED)
    vocab, grammars = tokenizer.vocab_size, Grammars(tokenizer, tokenizer.vocab_size)
    make = lambda: Engine(PagedExecutable(vocab_size=vocab), Sampler(vocab), tokenizer.eos_token_ids, grammars=grammars)
    check_every_cut(make, [5], SamplingParams(max_tokens=60, seed=3, grammar=GRAMMAR, logprobs=logprobs))


def test_refuses_tokens_that_the_answer_cannot_have():
    engine, params = Engine(PagedExecutable(), Sampler(50)), SamplingParams(max_tokens=4)
    for drawn, changes in (([1, 2, 3, 4], {}), ([50], {}), ([1], {"mirostat": 2})):
        with pytest.raises(RequestError):
            engine.add(0, [1], dataclasses.replace(params, **changes), drawn=drawn)
    assert not engine.has_work
