"""llama.cpp's samplers against llama.cpp itself (tests/golden/make_sampler_golden.py), and what else must hold."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist.config.samplers import SAMPLERS
from ckdist.engine.dry_breakers import DryBreakers
from ckdist.engine.load_model import BUNDLED
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.sampling_state import SamplingState, sampling_state
from ckdist.errors import ConfigError
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.support.cases import cases
from tests.support.paths import GOLDEN as GOLDEN_FILES
from tests.support.sample_row import SampleRow

F32 = np.float32
SEED = 9
GOLDEN = np.load(GOLDEN_FILES / "sampler.npz")
CASES = json.loads(str(GOLDEN["cases"]))


def uniforms(positions: np.ndarray, seed: int = SEED) -> np.ndarray:
    """The draws that belong to positions, float64, by the documented hash."""

    def mix(x):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = mix(np.array([seed], np.uint64) + golden)
        bits = mix(key + golden * (positions.astype(np.uint64) + np.uint64(1)))
    return ((bits >> np.uint64(11)).astype(float) + 0.5) * 2.0**-53


POSITIONS = np.arange(400_000)
POSITIONS = POSITIONS[np.argsort(uniforms(POSITIONS))]
UNIFORMS = uniforms(POSITIONS)


@pytest.fixture(scope="module")
def dry_breakers():
    return DryBreakers(tokenizer_of(BUNDLED))


def params_of(fields: dict) -> SamplingParams:
    return SamplingParams(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    )


def state_of(params, vocab, dry_breakers=None):
    return sampling_state(params, (), vocab, dry_breakers)


def assert_distribution(logits, want, row_at) -> None:
    """`row_at(position)` draws from the probabilities `want`: it is asked at the start and at the end of every token's
    share of the unit interval. So no token more or less is kept, and none is much more or less likely.
    """
    cumulative = np.cumsum(want)
    kept = np.repeat(np.flatnonzero(want > 1e-7), 2)
    before, width = cumulative[kept] - want[kept], want[kept]
    i = np.searchsorted(UNIFORMS[:-1], before + np.tile([0.005, 0.995], len(kept) // 2) * width)
    margin = 1e-3 * width + 1e-6
    inside = (before + margin < UNIFORMS[i]) & (UNIFORMS[i] < before + width - margin)
    tokens, positions = kept[inside], POSITIONS[i[inside]].tolist()
    assert len(tokens) > 0
    got = Sampler(len(logits)).sample(
        np.broadcast_to(logits, (len(tokens), len(logits))), [row_at(p) for p in positions]
    )
    wrong = [
        (want, sample.token, p) for want, sample, p in zip(tokens, got, positions, strict=True) if sample.token != want
    ]
    assert not wrong, f"{len(wrong)} of {len(tokens)} draws: {wrong[:5]}"


@cases("i", range(len(CASES)))
def test_keeps_what_llama_cpp_keeps(i, dry_breakers):
    case = CASES[i]
    logits, want = GOLDEN[f"row{case['row']}"], GOLDEN[f"kept{i}"].astype(float)
    params, history = params_of(case["params"]), np.array(case["history"], np.int32)
    state = state_of(params, len(logits), dry_breakers)
    if params.mirostat:
        assert case["mu"] != 2 * params.mirostat_tau or state.mirostat_mu == F32(case["mu"])
        state.mirostat_mu = case["mu"]
    half = len(history) // 2
    assert_distribution(
        logits, want / want.sum(), lambda p: SampleRow(params, SEED, p, history[:half], history[half:], state)
    )


@pytest.mark.parametrize("breakers, length", [((), 3), (("a",), 3), (("ab",), 2), (("a", "ab"), 2)])
def test_the_longest_of_several_breakers_ends_a_repetition(dry_breakers, breakers, length):
    """`bXY` repeats. A breaker ends it if one of its tokens is part of it: `b` is the end of `ab`."""
    pieces = tokenizer_of(BUNDLED).pieces
    history = np.array([pieces.index(bytes([byte])) for byte in b"bXYZabXY"], np.int32)
    logits = np.zeros((1, len(pieces)), F32)
    logits[0, history[3]] = 3  # less a penalty of 2 to the power of length - 1
    dry = {"dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": breakers}
    params = SamplingParams(temperature=0.0, **dry)
    row = SampleRow(params, SEED, 9, history[:4], history[4:], state_of(params, len(pieces), dry_breakers))
    (sample,) = Sampler(len(pieces)).sample(logits, [row])
    assert (sample.token == history[3]) == (length == 2)


@cases("i", [i for i, case in enumerate(CASES) if case["params"].get("mirostat")])
def test_mirostat_learns_from_the_probability_of_what_was_drawn(i):
    case, want = CASES[i], GOLDEN[f"kept{i}"].astype(float)
    params = params_of(case["params"])
    state = SamplingState(mirostat_mu=case["mu"])
    for position in range(20):
        (sample,) = Sampler(len(want)).sample(
            GOLDEN[f"row{case['row']}"][None], [SampleRow(params, SEED, position, sampling_state=state)]
        )
        mu = case["mu"] - params.mirostat_eta * (-np.log2(want[sample.token]) - params.mirostat_tau)
        assert sample.mirostat_mu == pytest.approx(mu, abs=1e-3)


OFF = {
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.7,
    "dry_multiplier": 0.0,
    "dry_base": 3.0,
    "dry_allowed_length": 7,
    "mirostat": 0,
    "mirostat_tau": 2.0,
    "mirostat_eta": 0.7,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 4.0,
    "min_keep": 1,
    "samplers": ("penalties", "dry", "temperature", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
}


@given(st.floats(0, 3), st.integers(0, 50), st.floats(0, 1), st.floats(0, 1), st.floats(0.5, 2), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_what_is_off_changes_nothing(temperature, top_k, top_p, min_p, repetition, seed):
    logits = np.random.default_rng(seed).normal(size=(1, 500)).astype(F32) * 3
    fields = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition,
        "presence_penalty": 0.1,
        "logprobs": 2,
    }
    draw = lambda params: Sampler(500).sample(logits, [SampleRow(params, seed, 4, [1, 2, 3], [4, 5])])
    plain = SamplingParams(**fields)
    assert SamplingParams(**fields, **OFF).steps is None and draw(SamplingParams(**fields, **OFF)) == draw(plain)
    for name, value in OFF.items():
        assert draw(SamplingParams(**fields, **{name: value})) == draw(plain), name
    xtc = SamplingParams(**fields, xtc_probability=1.0, xtc_threshold=0.51)
    assert draw(xtc) == draw(plain)


def test_steps_in_the_usual_order_draw_as_without_steps():
    logits = np.random.default_rng(1).normal(size=(1, 3000)).astype(F32) * 2
    fields = {
        "temperature": 0.9,
        "top_k": 200,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
    }
    rows = lambda params: [SampleRow(params, 5, p, [1, 2, 3], [4, 5]) for p in range(200)]
    many = np.broadcast_to(logits, (200, 3000))
    stepped = SamplingParams(**fields, min_keep=2)
    assert stepped.steps is not None
    assert Sampler(3000).sample(many, rows(stepped)) == Sampler(3000).sample(many, rows(SamplingParams(**fields)))


def test_a_window_of_all_tokens_counts_the_prompt_too():
    logits = np.zeros((1, 8), F32)
    row = lambda **fields: SampleRow(
        SamplingParams(temperature=0.0, logit_bias={1: 0.5, 2: 0.4}, **fields), 0, 3, [1, 1], [2]
    )
    draw = lambda **fields: Sampler(8).sample(logits, [row(**fields)])[0].token
    assert draw(presence_penalty=0.3) == 1  # of the output alone, as in the OpenAI API
    assert draw(frequency_penalty=0.3, repeat_last_n=-1) == 2
    assert draw(frequency_penalty=0.3, repeat_last_n=1) == 1
    assert draw(frequency_penalty=0.3, repeat_last_n=0) == 1


def test_xtc_is_applied_as_often_as_asked():
    logits = np.log(np.array([[0.6, 0.3, 0.1]], F32))
    params = SamplingParams(xtc_probability=0.25, xtc_threshold=0.2)
    rows = [SampleRow(params, SEED, p) for p in range(8000)]
    counts = (
        np.bincount([s.token for s in Sampler(3).sample(np.broadcast_to(logits, (8000, 3)), rows)], minlength=3) / 8000
    )
    # Applied, token 0 goes: the others have 3/4 and 1/4.
    np.testing.assert_allclose(counts, 0.75 * np.array([0.6, 0.3, 0.1]) + 0.25 * np.array([0, 0.75, 0.25]), atol=0.02)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [2.0, 5.0])
def test_mirostat_keeps_the_surprise_near_its_target(version, tau):
    vocab, rng = 5000, np.random.default_rng(3)
    params = SamplingParams(mirostat=version, mirostat_tau=tau, mirostat_eta=0.2)
    state, sampler, surprise = state_of(params, vocab), Sampler(vocab), []
    for position in range(600):
        logits = (-1.1 * np.log(np.arange(1, vocab + 1)) * rng.uniform(0.9, 1.2))[rng.permutation(vocab)].astype(F32)
        before = state.mirostat_mu
        (sample,) = sampler.sample(logits[None], [SampleRow(params, SEED, position, sampling_state=state)])
        surprise.append((before - sample.mirostat_mu) / params.mirostat_eta + tau)
        state.mirostat_mu = sample.mirostat_mu
    assert np.mean(surprise[100:]) == pytest.approx(tau, abs=0.05 * tau)


def test_banned_tokens_are_never_drawn():
    logits = np.zeros((1, 40), F32)
    logits[0, :5] = 50.0
    state = SamplingState(banned=np.arange(5, dtype=np.int32))
    for fields in (
        {},
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"typical_p": 0.2},
        {"mirostat": 2, "mirostat_tau": 30.0},
        {"top_n_sigma": 3.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"min_keep": 40, "top_p": 0.1},
        {"dynatemp_range": 1.0},
        {"top_k": 39},
    ):
        params = SamplingParams(**fields, logit_bias={2: 100.0})
        rows = [SampleRow(params, SEED, p, sampling_state=state) for p in range(200)]
        assert min(s.token for s in Sampler(40).sample(np.broadcast_to(logits, (200, 40)), rows)) >= 5, fields


fields = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-4, 0.7, 1.0, 100.0]),
        "typical_p": st.floats(0, 1),
        "top_n_sigma": st.floats(-1, 100),
        "top_k": st.integers(0, 50),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "xtc_probability": st.floats(0, 1),
        "xtc_threshold": st.floats(0, 1),
        "dry_multiplier": st.sampled_from([0.0, 1e-3, 1000.0]),
        "dry_base": st.sampled_from([1.0, 1.75, 1000.0]),
        "dry_allowed_length": st.integers(0, 5),
        "dry_penalty_last_n": st.integers(-1, 40),
        "mirostat": st.sampled_from([0, 0, 0, 1, 2]),
        "mirostat_tau": st.floats(0, 100),
        "mirostat_eta": st.floats(0, 1),
        "dynatemp_range": st.sampled_from([0.0, 0.0, 0.5, 100.0]),
        "dynatemp_exponent": st.floats(0, 100),
        "repeat_last_n": st.one_of(st.none(), st.integers(-1, 40)),
        "repetition_penalty": st.floats(0.1, 10),
        "presence_penalty": st.floats(-100, 100),
        "min_keep": st.integers(0, 2**31 - 1),
        "samplers": st.one_of(st.none(), st.lists(st.sampled_from(SAMPLERS), max_size=12).map(tuple)),
    }
)


@given(
    fields,
    st.integers(1, 400),
    st.integers(0, 1000),
    st.sampled_from(["normal", "ties", "flat", "steep"]),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_any_settings_draw_a_token_and_the_same_one_in_any_company(fields, vocab, seed, kind, bans):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(1, vocab)).astype(F32) * 3
    logits = {"normal": logits, "ties": np.round(logits), "flat": logits * 0, "steep": logits * F32(1e37)}[kind]
    params = SamplingParams(**fields, seed=seed, dry_sequence_breakers=())
    state = state_of(params, vocab) or SamplingState()
    if bans and vocab > 1:
        state.banned = np.arange(vocab // 2, dtype=np.int32)
    history = rng.integers(0, min(vocab, 6), 40).astype(np.int32)
    row = SampleRow(params, seed, 40, history[:15], history[15:], state)
    sampler = Sampler(vocab)
    try:
        (alone,) = sampler.sample(logits, [row])
    except ConfigError as error:
        assert kind == "steep" and "make logits infinite" in str(error)
        return
    assert (vocab // 2 if bans and vocab > 1 else 0) <= alone.token < vocab
    if params.mirostat:
        assert np.isfinite(alone.mirostat_mu)
    others = [SampleRow(SamplingParams(typical_p=0.5), 1, 2), SampleRow(SamplingParams(mirostat=2), 1, 3), row]
    assert sampler.sample(np.repeat(logits, 3, 0), others)[2] == alone


@pytest.mark.parametrize(
    "name, value",
    [
        ("typical_p", 1.5),
        ("typical_p", np.nan),
        ("dry_base", 0.5),
        ("dry_multiplier", np.inf),
        ("dry_allowed_length", -1),
        ("xtc_threshold", -0.1),
        ("dynatemp_exponent", np.inf),
        ("min_keep", -1),
        ("mirostat_tau", np.nan),
        ("mirostat_eta", -1.0),
        ("mirostat", 3),
    ],
)
def test_wrong_parameters_are_refused(name, value):
    on = {
        "typical_p": 0.5,
        "mirostat": 1 if name.startswith("miro") else 0,
        "dry_multiplier": 1.0,
        "xtc_probability": 0.5,
        "dynatemp_range": 0.5,
    }
    params = SamplingParams(**{**on, name: value})
    with pytest.raises(ConfigError, match=name):
        Sampler(100).sample(np.zeros((1, 100), F32), [SampleRow(params)])
