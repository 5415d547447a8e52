"""The sampler against a float64 reference that sorts the whole vocabulary, and its draw against the documented hash."""

import array
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist import errors
from ckdist.engine.sampler import Sample, Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.sampling_state import SamplingState
from ckdist.program.pool import ThreadPool
from tests.support.sample_row import SampleRow

F32 = np.float32
MASK = (1 << 64) - 1
POOL = ThreadPool(3)


def mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def uniform(seed, position):
    golden = 0x9E3779B97F4A7C15
    bits = mix(mix((seed + golden) & MASK) + golden * (position + 1) & MASK)
    return ((bits >> 11) + 0.5) * 2.0**-53


def log_softmax(x):
    x = x.astype(float)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def modified(x, row):
    x, p = x.astype(float), row.params
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in {*row.prompt, *row.output}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        count = list(row.output).count(token)
        x[token] -= p.presence_penalty * (count > 0) + p.frequency_penalty * count
    return x


def kept_probabilities(x, row):
    """(vocab,) probabilities after every cut, 0 where cut away."""
    p = row.params
    x = modified(x, row)
    order = np.lexsort((np.arange(len(x)), -x))
    terms = np.exp((x - x.max()) / p.temperature)[order]
    if 0 < p.top_k < len(x):
        terms[p.top_k :] = 0
    if p.top_p < 1:
        keep = np.searchsorted(np.cumsum(terms), p.top_p * terms.sum()) + 1
        terms[keep:] = 0
    terms[terms < p.min_p] = 0
    out = np.zeros(len(x))
    out[order] = terms / terms.sum()
    return out


def assert_draw(x, row, token):
    """The token is the one that the hash points at, give or take float32's rounding of a boundary."""
    cumulative = np.cumsum(kept_probabilities(x, row))
    u = uniform(row.seed, row.length)
    before = cumulative[token - 1] if token else 0.0
    assert before - 2e-5 <= u <= cumulative[token] + 2e-5


def params(**changes):
    return SamplingParams(**{"temperature": 0.0, **changes})


def logits_of(vocab, rows=1, seed=0, spread=3.0):
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * spread).astype(F32)


@pytest.mark.parametrize("vocab", [1, 15, 17, 1024, 1025, 5000, 151_936])
def test_greedy_takes_the_lowest_of_equals(vocab):
    logits = logits_of(vocab, 5)
    for i, row in enumerate(logits):
        row[[vocab - 1, vocab * i // 5]] = 50
    got = Sampler(vocab).sample(logits, [SampleRow(params())] * 5)
    assert got == [Sample(int(t)) for t in logits.argmax(1)]


def test_negative_logits_and_strided_rows():
    logits = (-(logits_of(300, 4, spread=1) ** 2) - 5)[::2]
    assert [s.token for s in Sampler(300).sample(logits, [SampleRow(params())] * 2)] == logits.argmax(1).tolist()


@pytest.mark.parametrize("vocab, top", [(40, 20), (10, 20), (151_936, 5), (2000, 0)])
def test_logprobs(vocab, top):
    logits = logits_of(vocab, 3)
    logits[1, :] = np.round(logits[1])  # many ties
    targets = np.array([0, vocab // 2, vocab - 1], np.int32)
    for row, target, sample in zip(logits, targets, Sampler(vocab).logprobs(logits, targets, top), strict=True):
        want = log_softmax(row)
        assert sample.token == target
        assert sample.logprob == pytest.approx(want[target], abs=2e-5)
        order = np.lexsort((np.arange(vocab), -row.astype(float)))[:top]
        assert [t for t, _ in sample.top] == order.tolist()
        np.testing.assert_allclose([p for _, p in sample.top], want[order], atol=2e-5)


def test_logprobs_are_of_the_logits_before_bias_and_temperature():
    logits = logits_of(500)
    row = SampleRow(params(temperature=0.3, logit_bias={7: 100.0}, logprobs=2))
    (sample,) = Sampler(500).sample(logits, [row])
    assert sample.token == 7
    assert sample.logprob == pytest.approx(log_softmax(logits[0])[7], abs=2e-5)
    assert [t for t, _ in sample.top] == np.argsort(-logits[0])[:2].tolist()


CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 1500, "temperature": 3.0},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"top_p": 0.999, "temperature": 5.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"top_p": 0.95, "min_p": 0.001, "temperature": 2.0},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("vocab", [3, 1000, 20_000])
def test_draws_are_those_of_the_reference(cut, vocab):
    logits = logits_of(vocab, spread=2.0)
    rows = [SampleRow(params(**{"temperature": 0.8, **cut}), seed=11, length=p) for p in range(60)]
    many = np.broadcast_to(logits, (60, vocab))
    for row, sample in zip(rows, Sampler(vocab).sample(many, rows), strict=True):
        assert_draw(logits[0], row, sample.token)


@given(
    st.integers(1, 3000),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.floats(0.05, 5),
    st.integers(0, 100),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_settings(vocab, seed, position, temperature, top_k, top_p, min_p, coarse):
    logits = logits_of(vocab, seed=vocab)
    if coarse:
        logits = np.round(logits)
    row = SampleRow(params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), seed, position)
    (sample,) = Sampler(vocab).sample(logits, [row])
    cumulative = np.cumsum(kept_probabilities(logits[0], row))
    before = cumulative[sample.token - 1] if sample.token else 0.0
    # A cut between two tokens of nearly equal mass may fall either way in float32: then one token more or less is kept.
    slack = 2e-4 + 1.5 * kept_probabilities(logits[0], row).min(initial=1, where=kept_probabilities(logits[0], row) > 0)
    assert before - slack <= uniform(seed, position) <= cumulative[sample.token] + slack


def test_frequencies_follow_the_distribution():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], F32))
    rows = [SampleRow(params(temperature=1.0), seed=s, length=p) for s in range(20) for p in range(500)]
    got = Sampler(4).sample(np.broadcast_to(logits, (10_000, 4)), rows)
    share = np.bincount([s.token for s in got], minlength=4) / 10_000
    np.testing.assert_allclose(share, [0.5, 0.3, 0.15, 0.05], atol=0.015)


def test_threads_that_divide_the_rows_draw_the_tokens_of_one():
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, (37, 3000)).astype(F32)
    changes = [{}, {"temperature": 0.7}, {"top_k": 9, "logprobs": 2}, {"top_p": 0.9, "repetition_penalty": 1.2}]
    rows = [
        SampleRow(params(**{"temperature": 1.0, **changes[i % 4]}), i, i, rng.integers(0, 3000, i)) for i in range(37)
    ]
    one, many = Sampler(3000), Sampler(3000, POOL)
    assert many.sample(logits, rows) == one.sample(logits, rows)
    greedy = [SampleRow(params())] * 37
    assert many.sample(logits, greedy) == one.sample(logits, greedy)
    targets = rng.integers(0, 3000, 37).astype(np.int32)
    assert many.logprobs(logits, targets, 3) == one.logprobs(logits, targets, 3)


def test_a_row_does_not_depend_on_the_others():
    vocab = 5000
    logits = logits_of(vocab, 6)
    prompt, output = [1, 2, 3], [5, 5, 9]
    rows = [
        SampleRow(params()),
        SampleRow(params(temperature=1.0), 3, 8),
        SampleRow(params(temperature=1.0, top_p=0.9, logprobs=3), 3, 9),
        SampleRow(params(repetition_penalty=1.3, presence_penalty=0.5), 0, 0, prompt, output),
        SampleRow(params(temperature=0.7, top_k=20, frequency_penalty=1.0), 4, 4, prompt, array.array("i", output)),
        SampleRow(params(logit_bias={17: 5.0})),
    ]
    sampler = Sampler(vocab)
    together = sampler.sample(logits, rows)
    for i in (4, 2, 0, 5, 3, 1):
        assert sampler.sample(logits[i : i + 1], rows[i : i + 1]) == [together[i]]


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"logit_bias": {3: -100.0, 11: 2.5}},
        {"repetition_penalty": 0.6, "frequency_penalty": -1.0, "logit_bias": {1: 1.0}},
    ],
    ids=str,
)
def test_penalties_and_bias(changes):
    vocab, prompt, output = 30, [1, 1, 4, 29], [4, 7, 7, 7, 3]
    for seed in range(20):
        logits = logits_of(vocab, seed=seed)
        row = SampleRow(params(temperature=1.5, **changes), seed, 5, prompt, np.array(output, np.int32))
        (sample,) = Sampler(vocab).sample(logits, [row])
        assert_draw(logits[0], row, sample.token)
        greedy = SampleRow(params(**changes), 0, 0, prompt, output)
        assert Sampler(vocab).sample(logits, [greedy])[0].token == modified(logits[0], greedy).argmax()


def test_flat_and_extreme_distributions():
    flat = np.zeros((1, 151_936), F32)
    row = SampleRow(params(temperature=2.0, top_p=0.99), 1, 1)
    token = Sampler(151_936).sample(flat, [row])[0].token
    assert abs(token - uniform(1, 1) * 0.99 * 151_936) < 3
    steep = np.full((1, 5000), -3e38, F32)
    steep[0, 4321] = 3e38
    for cut in CUTS:
        row = SampleRow(params(**{"temperature": 1e-4, **cut}), 1, 1)
        assert Sampler(5000).sample(steep, [row])[0].token == 4321


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_name_the_row(bad):
    logits = logits_of(1000, 4)
    logits[2, 999] = bad
    logits[3, 1] = bad
    for sampler in (Sampler(1000), Sampler(1000, POOL)):
        for row in (SampleRow(params()), SampleRow(params(temperature=1.0))):
            with pytest.raises(errors.NativeError, match="row 2 are not finite"):
                sampler.sample(logits, [row] * 4)
        with pytest.raises(errors.NativeError, match="row 2"):
            sampler.logprobs(logits, np.zeros(4, np.int32))


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": np.nan}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"presence_penalty": np.inf}, "presence_penalty"),
        ({"logit_bias": {1000: 1.0}}, "token 1000"),
        ({"logit_bias": {-1: 1.0}}, "token -1"),
        ({"logit_bias": {1: np.inf}}, "logit_bias"),
    ],
)
def test_wrong_parameters_are_refused(changes, name):
    with pytest.raises(errors.ConfigError, match=name):
        Sampler(1000).sample(logits_of(1000), [SampleRow(SamplingParams(**changes))])


def test_wrong_tokens_and_shapes_are_refused():
    sampler = Sampler(1000)
    with pytest.raises(errors.ConfigError, match="token 1000 in the prompt of row 0"):
        sampler.sample(logits_of(1000), [SampleRow(params(repetition_penalty=2.0), 0, 0, [5, 1000])])
    assert sampler.sample(logits_of(1000), [SampleRow(params())])  # an error leaves nothing behind
    with pytest.raises(errors.ConfigError, match="token 1000"):
        sampler.logprobs(logits_of(1000), np.array([1000], np.int32))
    with pytest.raises(errors.NativeError, match="float32"):
        sampler.sample(logits_of(1000).astype(float), [SampleRow(params())])
    with pytest.raises(errors.NativeError, match="999"):
        sampler.sample(logits_of(999), [SampleRow(params())])
    with pytest.raises(errors.ConfigError, match="vocabulary of 0"):
        Sampler(0)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 4097])
def test_a_mask_removes_what_it_does_not_allow(vocab):
    rng = np.random.default_rng(vocab)
    for seed, changes in enumerate([{"temperature": 0.0}, {}, {"top_p": 0.7, "min_p": 0.01}, {"top_k": 5}] * 5):
        allowed = rng.random(vocab) < (0.02, 0.5, 0.98)[seed % 3]
        allowed[rng.integers(vocab)] = True
        logits = logits_of(vocab, seed=seed)
        row = SampleRow(params(**changes), seed, 7, sampling_state=masked(allowed))
        (sample,) = Sampler(vocab).sample(logits, [row])
        assert allowed[sample.token]
        others = SamplingState(banned=np.flatnonzero(~allowed).astype(np.int32))
        (wanted,) = Sampler(vocab).sample(logits, [row._replace(sampling_state=others)])
        assert sample == wanted, "a mask bans the others"


def test_tokens_beyond_a_mask_are_not_drawn_and_an_empty_one_is_refused():
    logits = np.arange(100, dtype=F32)[None]
    assert (
        Sampler(100)
        .sample(logits, [SampleRow(params(temperature=0.0), sampling_state=masked(np.ones(64, bool)))])[0]
        .token
        == 63
    )
    with pytest.raises(errors.ConfigError, match="the mask of row 0 allows no token"):
        Sampler(100).sample(logits, [SampleRow(params(), sampling_state=masked(np.zeros(100, bool)))])


def masked(allowed):
    state = SamplingState(constraint=SimpleNamespace(allowed=None))
    bits = np.zeros(-(-len(allowed) // 32) * 32, bool)
    bits[: len(allowed)] = allowed
    state.constraint.allowed = np.packbits(bits, bitorder="little").view(np.uint32)
    return state
