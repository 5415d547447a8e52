"""llama.cpp's samplers inside the engine: states live through preemption, and wrong fields are refused by name."""

import dataclasses
import threading

import msgpack
import numpy as np
import pytest

from ckdist.config.generate_config import GenerateConfig
from ckdist.config.samplers import MAX_BREAKERS
from ckdist.engine.dry_breakers import MAX_KEPT, DryBreakers
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import BUNDLED
from ckdist.engine.messages import TO_RANK_0, read
from ckdist.engine.request import check_breakers, check_sampling
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import PARAMETERS, SamplingParams
from ckdist.engine.sampling_state import sampling_state
from ckdist.engine.scheduler import EngineBusy
from ckdist.errors import ConfigError, RequestError
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.support.paged_executable import PagedExecutable, prefix_logits
from tests.support.sample_row import SampleRow

STATEFUL = [
    {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5},
    {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.5, "temperature": 0.8},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    {"min_tokens": 9, "stop_token_ids": (3, 4, 5, 6, 7, 8), "xtc_probability": 0.5},
    {"typical_p": 0.5, "repetition_penalty": 1.3, "repeat_last_n": 8, "dynatemp_range": 0.5},
]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(BUNDLED)


def finish(engine, limit=10_000) -> dict:
    outputs: dict = {}
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            tokens, _ = outputs.get(output.id, ([], None))
            outputs[output.id] = [*tokens, *output.tokens], output.finish_reason
    raise AssertionError("the engine makes no progress")


def alone(prompt, params, vocab=50) -> list[int]:
    """Token by token, with the sampler alone."""
    sampler, output, state = Sampler(vocab), [], sampling_state(params, (), vocab, None)
    banned = state and state.banned
    while len(output) < params.max_tokens:
        if state is not None:
            state.banned = banned if len(output) < params.min_tokens else None
        row = SampleRow(params, params.seed, len(prompt) + len(output), prompt, output, state)
        (sample,) = sampler.sample(prefix_logits([*prompt, *output], vocab)[None], [row])
        if sample.token in params.stop_token_ids:
            break
        if params.mirostat:
            state.mirostat_mu = sample.mirostat_mu
        output.append(sample.token)
    return output


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_everyone_gets_what_they_would_get_alone_also_when_preempted(prefix_reuse):
    engine = Engine(PagedExecutable(num_blocks=9), Sampler(50), prefix_reuse=prefix_reuse)
    wanted = {}
    for i, fields in enumerate(STATEFUL * 2):
        params = SamplingParams(max_tokens=40, seed=i, **fields)
        prompt = list(range(i, i + 6))
        engine.add(i, prompt, params)
        wanted[i] = alone(prompt, params)
    results = finish(engine)
    assert engine.scheduler.preemptions > 0
    assert {i: tokens for i, (tokens, _) in results.items()} == wanted


def test_neither_eos_nor_a_stop_token_comes_before_min_tokens():
    class Eager(PagedExecutable):
        def run(self, batch):
            logits = super().run(batch)
            logits[:, 7], logits[:, 8] = 30.0, 20.0
            return logits

    engine = Engine(Eager(), Sampler(50), {7})
    for id, fields in enumerate(
        [{}, {"min_tokens": 5}, {"min_tokens": 5, "temperature": 1.0}, {"min_tokens": 8, "ignore_eos": True}]
    ):
        given = {"temperature": 0.0, **fields}
        engine.add(id, [1, 2], SamplingParams(max_tokens=8, stop_token_ids=(8,), seed=1, **given))
    results = finish(engine)
    assert results[0] == ([], "stop")
    for id, length in (1, 5), (2, 5), (3, 8):
        tokens, reason = results[id]
        assert len(tokens) == length and reason == ("stop" if length < 8 else "length")
        assert {7, 8}.isdisjoint(tokens)


def test_a_state_that_is_no_longer_needed_is_dropped():
    engine = Engine(PagedExecutable(), Sampler(50), {7})
    engine.add(0, [1], SamplingParams(max_tokens=6, min_tokens=3, temperature=0.0, ignore_eos=True))
    sequence = engine._sequences[0]
    states = []
    while engine.has_work:
        engine.step()
        states.append(sequence.sampling_state is None)
    assert states == [False, False, True, True, True, True]


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"min_tokens": 17}, "min_tokens (17) is more than max_tokens (16); lower it"),
        ({"min_tokens": -1}, "min_tokens must be"),
        ({"min_tokens": 2, "stop_token_ids": tuple(range(50))}, "min_tokens leaves no token"),
        ({"temperature": 100.5}, "temperature must be a number from 0 to 100"),
        ({"typical_p": 1.1}, "typical_p must be"),
        ({"top_n_sigma": float("inf")}, "top_n_sigma must be"),
        ({"xtc_probability": -0.1}, "xtc_probability must be"),
        ({"xtc_threshold": "x"}, "xtc_threshold must be"),
        ({"dry_multiplier": -1.0}, "dry_multiplier must be"),
        ({"dry_base": 0.99}, "dry_base must be"),
        ({"dry_allowed_length": -1}, "dry_allowed_length must be"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n must be"),
        ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers must be a list"),
        ({"dry_sequence_breakers": (1,)}, "dry_sequence_breakers[0] must be a string"),
        ({"dry_sequence_breakers": ("",)}, "dry_sequence_breakers has a string of 0 bytes"),
        ({"dry_sequence_breakers": ("x" * 41,)}, "dry_sequence_breakers has a string of 41 bytes"),
        (
            {"dry_sequence_breakers": tuple("x" * 39 + chr(97 + i) for i in range(20))},
            "dry_sequence_breakers has 800 bytes",
        ),
        ({"dry_sequence_breakers": ("\ud800",)}, "dry_sequence_breakers has a string that is not valid Unicode"),
        ({"dry_sequence_breakers": ("x",) * (MAX_BREAKERS + 1)}, "dry_sequence_breakers must be a list of at most 64"),
        ({"dry_multiplier": 1.0}, "dry_sequence_breakers need a tokenizer"),
        ({"mirostat": 3}, "mirostat must be"),
        ({"mirostat": True}, "mirostat must be"),
        ({"mirostat_tau": float("nan")}, "mirostat_tau must be"),
        ({"mirostat_eta": 1.5}, "mirostat_eta must be"),
        ({"dynatemp_range": -1.0}, "dynatemp_range must be"),
        ({"dynatemp_exponent": 101.0}, "dynatemp_exponent must be"),
        ({"repeat_last_n": -2}, "repeat_last_n must be"),
        ({"min_keep": -1}, "min_keep must be"),
        ({"samplers": "top_k"}, "samplers must be a list"),
        ({"samplers": ("top_k", "infill")}, "samplers has an unknown name 'infill'"),
        ({"samplers": ("top_k",) * 33}, "samplers must be a list of at most 32"),
    ],
)
def test_refuses_what_is_wrong_by_name(fields, name):
    engine = Engine(PagedExecutable(), Sampler(50), {7})
    with pytest.raises(RequestError) as error:
        engine.add(0, [1], SamplingParams(**fields))
    assert str(error.value).startswith(name) and "\n" not in str(error.value)
    assert not engine.has_work


def test_a_message_brings_lists_as_tuples():
    sampling = {"samplers": ["top_k"], "dry_sequence_breakers": ["\n"], "stop_token_ids": [1]}
    message = {"op": "submit", "id": "a", "prompt": bytes(4), "sampling": sampling}
    params = read(msgpack.packb(message), TO_RANK_0).sampling
    assert (params.samplers, params.dry_sequence_breakers, params.stop_token_ids) == (("top_k",), ("\n",), (1,))


def test_a_request_waits_for_its_breakers_and_nobody_else_does(tokenizer):
    go = threading.Event()

    class Slow(DryBreakers):
        def _open(self, breakers):
            assert go.wait(60)
            return super()._open(breakers)

    vocab = tokenizer.vocab_size
    engine = Engine(PagedExecutable(vocab_size=vocab), Sampler(vocab), make_breakers=lambda: Slow(tokenizer))
    params = SamplingParams(max_tokens=5, temperature=0.0, dry_multiplier=1.0)
    engine.add("before", [1], SamplingParams(max_tokens=5, temperature=0.0))
    engine.add("dry", [2], params)
    engine.add("aborted", [2], params)
    outputs = [output.id for _ in range(8) for output in engine.step()]
    assert outputs == ["before"] * 5
    for i in range(MAX_KEPT - 1):
        engine.add(i, [2], dataclasses.replace(params, dry_sequence_breakers=(f"x{i}",)))
        engine.abort(i)
    with pytest.raises(EngineBusy, match="too many sets of dry_sequence_breakers"):
        engine.add("flood", [2], dataclasses.replace(params, dry_sequence_breakers=("y",)))
    assert engine.abort("aborted").finish_reason == "abort"
    go.set()
    tokens, reason = finish(engine)["dry"]
    assert reason == "length" and len(tokens) == 5


def heads_of(tokenizer, breakers) -> list[tuple[int, int]]:
    """(head, length of its tail), straight from the definition."""
    found = set()
    for token, piece in enumerate(tokenizer.pieces):
        for breaker in breakers:
            if breaker in piece:
                found.add((token, ()))
                continue
            for n in range(1, min(len(breaker), len(piece) + 1)):
                if piece.endswith(breaker[:n]):
                    rest = breaker[n:]
                    lead = next((i for i, byte in enumerate(rest) if byte & 0xC0 != 0x80), len(rest))
                    tail = [tokenizer.pieces.index(rest[i : i + 1]) for i in range(lead)]
                    found.add((token, tuple(tail + tokenizer.encode(rest[lead:].decode(), add_special=False))))
    return sorted((token, len(tail)) for token, tail in found)


@pytest.mark.parametrize(
    "breakers",
    [
        ("\n", ":", '"', "*"),
        ("return x", " self."),
        ("aba", "ab", "abab"),
        ("é", "naïve", "日本"),
        ("e" * 40, " the end of the"),
    ],
)
def test_breakers_are_found_where_tokens_contain_or_begin_them(tokenizer, breakers):
    from ckdist.native import ffi, lib

    found = DryBreakers(tokenizer).find(breakers).result(30)
    capacity = 50_000
    heads, lengths = ffi.new("int32_t[]", capacity), ffi.new("int32_t[]", capacity)
    n = lib.ckdist_dry_breakers_list(found, heads, lengths, capacity)
    assert sorted(zip(heads[0:n], lengths[0:n], strict=True)) == heads_of(tokenizer, check_breakers(breakers))


def test_breakers_are_prepared_once_and_few_are_kept(tokenizer):
    breakers = DryBreakers(tokenizer)
    first = breakers.find(("a", "b"))
    first.result(30)
    assert breakers.find(("a", "b", "a")) is first
    for i in range(40):
        breakers.find((f"x{i}",)).result(30)
    assert len(breakers._kept) == MAX_KEPT and breakers.find(("a", "b")) is not first


def test_dry_stops_a_repetition_and_a_breaker_lets_it_be(tokenizer):
    word, colon = tokenizer.encode(" word", add_special=False), tokenizer.encode(":", add_special=False)
    history = [*word, 900, 901, 902, *colon, 903, 900, 901]
    logits = np.zeros((1, tokenizer.vocab_size), np.float32)
    logits[0, 902], logits[0, 5] = 1.0, 0.5

    def drawn(history, **fields):
        params = SamplingParams(temperature=0.0, dry_multiplier=0.6, **fields)
        state = sampling_state(params, (), tokenizer.vocab_size, DryBreakers(tokenizer))
        return (
            Sampler(tokenizer.vocab_size)
            .sample(logits, [SampleRow(params, 0, len(history), history, [], state)])[0]
            .token
        )

    assert drawn(history) == 5
    assert drawn(history, dry_allowed_length=3) == 902
    assert drawn(history, dry_penalty_last_n=4) == 902
    assert drawn([*history[:-1], *colon, *history[-1:]]) == 902  # a breaker inside what would repeat


def test_flags_and_requests_have_one_range():
    for item in PARAMETERS:
        if item.metadata["high"] is None:
            continue
        with pytest.raises(RequestError, match=f"{item.name} must be .* to "):
            check_sampling(SamplingParams(**{item.name: item.metadata["high"] + 1}), 50)
        if item.metadata["flags"]:
            with pytest.raises(ConfigError, match=rf"{item.metadata['flags'][-1]} \(.*\) must be from .* to "):
                GenerateConfig(**{item.name: item.metadata["high"] + 1})
