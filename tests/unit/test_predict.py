"""Predictions for a described cluster: what is better is never slower, shares add up, what cannot be says so."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist.errors import ConfigError
from ckdist.layouts.rough_cost import experts_hit
from ckdist.plan.cluster import Cluster
from ckdist.plan.draft_speed import drafted
from ckdist.plan.machine_spec import MachineSpec
from ckdist.plan.predict import PredictedStepCost, Predictor, Question, Way, ways_for
from ckdist.plan.step_cost import StepTotals
from ckdist.plan.step_shape import Chunks, StepShape
from ckdist.weights.described import describe_config
from tests.support.paths import GOLDEN

MACHINE = MachineSpec(
    isa="avx512_bf16",
    cores=8,
    nodes=2,
    memory=64e9,
    bandwidth=100e9,
    cache=64e6,
    cache_bandwidth=3e11,
    attention=3e10,
    rates={"F32": (5e9, 4e10), "BF16": (1e10, 8e10), "Q8_0": (5e10, 2e11)},
    barrier=((2, 1e-6), (8, 2e-6)),
)
DENSE = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 512,
    "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
BETTER = "bandwidth", "cache_bandwidth", "attention", "elementwise", "rank_rate", "link_rate"
SMALLER = "between", "link_seconds"


def predictor(config=None, hosts=1, way=None, machine=MACHINE, kind="Q4_K"):
    checkpoint = describe_config(config or DENSE, "config.json", kind)
    return Predictor(Question(checkpoint, Cluster(machine, hosts), 0), way or Way("tensor"))


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(BETTER + SMALLER),
    factor=st.floats(1.0, 1e3),
    config=st.sampled_from((DENSE, MIXTURE)),
    hosts=st.sampled_from((1, 2, 3)),
    context=st.integers(0, 100_000),
)
def test_a_better_machine_is_never_slower(name, factor, config, hosts, context):
    better = {name: getattr(MACHINE, name) * (factor if name in BETTER else 1 / factor)}
    one, other = (predictor(config, hosts, machine=m) for m in (MACHINE, dataclasses.replace(MACHINE, **better)))
    assert other.decode(3, context).tokens >= one.decode(3, context).tokens * (1 - 1e-9)
    assert other.prefill(700, context).tokens >= one.prefill(700, context).tokens * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 512), more=st.integers(1, 512), context=st.integers(0, 10_000))
def test_more_work_takes_longer(tokens, more, context):
    p = predictor(MIXTURE)
    assert p.seconds(StepShape.prompt(tokens + more, context)) > p.seconds(StepShape.prompt(tokens, context))
    assert p.seconds(StepShape.decode(tokens, context + more)) > p.seconds(StepShape.decode(tokens, context))
    two = StepShape((Chunks(1, tokens, context), Chunks(2, 1, more)), 3)
    assert p.seconds(two) > p.seconds(StepShape((Chunks(1, tokens, context),), 1))


def test_hosts_wait_for_the_logits_that_they_gather():
    """Each sequence more sends its sums, one behind the embedding, and half of a row of logits to the other host."""
    slow = dataclasses.replace(MACHINE, nodes=1, link_seconds=0.0, link_rate=1e6)
    one, two = (predictor(hosts=2, machine=slow).decode(count, 0).times.link for count in (1, 2))
    sums = (2 * DENSE["num_hidden_layers"] + 1) * DENSE["hidden_size"]
    assert two - one == pytest.approx(4 * (sums + DENSE["vocab_size"] / 2) / 1e6)


@pytest.mark.parametrize("config", [DENSE, MIXTURE])
def test_shares_of_weights_add_up(config):
    """Of two ranks and of two stages; what is on every rank, norms and routers, counts twice."""
    whole = predictor(config, machine=dataclasses.replace(MACHINE, nodes=1)).memory(1024, 1)[0]
    half = predictor(config).memory(1024, 1)[0]
    assert whole.weights <= 2 * half.weights < 1.02 * whole.weights
    assert whole.cache == 2 * half.cache == pytest.approx(1024 * 4 * 8 * 128 * 2 * 2, rel=0.02)  # and scales
    stages = predictor(config, hosts=2, way=Way("stages", stages=2)).memory(1024, 1)
    tied = 32000 * 1024 * 34 // 32 if config is DENSE else 0  # the table is on the first and on the last stage
    assert sum(2 * s.weights for s in stages) == pytest.approx(whole.weights + tied, rel=0.02)
    assert whole.total == sum(dataclasses.astuple(whole)) - whole.experts
    assert (whole.experts > 0.5 * whole.weights) == (config is MIXTURE)


# Sixteen cores of a Xeon with AMX (docs/performance/predictions.md): one node, two or four, and one core.
TILES = dataclasses.replace(
    MACHINE, isa="amx", nodes=1, cores=16, memory=126e9, bandwidth=114e9, cache=3.1e8, attention=1e11,
    rates={"F32": (5e9, 84e9), "BF16": (1e10, 518e9), "Q8_0": (6e10, 409e9)}, barrier=((2, 5e-7), (16, 1.5e-6)),
)  # fmt: skip
LARGE = DENSE | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
MANY_EXPERTS = MIXTURE | {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
}  # fmt: skip


def test_prompts_in_tiles_are_predicted_as_measured():
    """Prompts of 512 in Q4_K. Each step expands the weights once, and a mixture's experts for few rows each."""

    def speed(config, nodes=1):
        """Tokens per second with a rank on each of `nodes` nodes of equal parts."""
        parts = {"cores": 16 // nodes, "memory": 126e9 / nodes, "bandwidth": 114e9 / nodes, "cache": 3.1e8 / nodes}
        return predictor(config, machine=dataclasses.replace(TILES, nodes=nodes, **parts)).prefill(512).tokens

    small = DENSE | {"num_hidden_layers": 28, "vocab_size": 151936}
    measured = {speed(LARGE): 424, speed(LARGE, 2): 365, speed(LARGE, 4): 335, speed(small): 4080}
    measured[speed(MANY_EXPERTS)] = 1134
    assert all(0.7 < seen / predicted < 1.0 for predicted, seen in measured.items()), measured
    checkpoint = describe_config(MANY_EXPERTS, "config.json", "Q4_K")
    steps = [
        Predictor(Question(checkpoint, Cluster(TILES), 0, ubatch_size=size), Way("tensor")) for size in (512, 2048)
    ]
    short, long = (step.prefill(2048).tokens for step in steps)
    assert steps[0].checkpoint.spec.usual_ubatch == 2048 and 1.15 < long / short < 1.35


def test_every_way_has_an_answer():
    for hosts in (1, 2, 4):
        for way in ways_for(Cluster(MACHINE, hosts), 4, True):
            p = predictor(MIXTURE, hosts, way)
            alone, many = p.decode(1, 512), p.decode(16, 512)
            assert many.tokens > alone.tokens > 0 and many.low < many.tokens < many.high
            assert alone.seconds == pytest.approx(1 / alone.tokens)
            assert alone.bound in ("bandwidth", "arithmetic", "exchange", "link", "latency")
    data = predictor(hosts=2, way=Way("data", replicas=2))
    assert data.decode(8, 512).tokens == pytest.approx(2 * predictor().decode(4, 512).tokens)


@pytest.mark.parametrize("name", ["glm_moe_dsa", "glm5_next", "hy_v4", "qwen4_exp"])
def test_a_model_whose_tokens_see_listed_positions_is_priced(name):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    assert predictor(config).decode(1, 64).tokens > 0


def test_stages_overlap_where_there_are_sequences_for_them():
    """One sequence passes the stages one after another, several keep all of them at work."""
    machine = dataclasses.replace(MACHINE, nodes=1, between=0.0)
    one = predictor(hosts=1, machine=machine)
    staged = predictor(hosts=2, way=Way("stages", stages=2), machine=machine)
    assert staged.decode(1, 512).tokens == pytest.approx(one.decode(1, 512).tokens, rel=0.1)
    assert staged.decode(2, 512).tokens > 1.3 * one.decode(1, 512).tokens
    assert staged.prefill(4096).tokens > 1.5 * one.prefill(4096).tokens


def test_a_way_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="3 hosts of 2 ranks cannot be 2 replicas"):
        predictor(hosts=3, way=Way("data", replicas=2))
    with pytest.raises(ConfigError, match="more than the 4 layers"):
        predictor(hosts=8, way=Way("stages", stages=8))
    with pytest.raises(ConfigError, match="a plan has from 1 to"):
        Cluster(MACHINE, 0)


def test_drafts_are_priced_by_their_rows_and_the_drafter():
    p, draft = predictor(), describe_config(DENSE | {"num_hidden_layers": 1}, "config.json", "Q4_K")
    one, step = p.seconds(StepShape.decode(1, 100)), lambda rows: p.seconds(StepShape((Chunks(1, rows, 100),), rows))
    own = predictor(DENSE | {"num_hidden_layers": 1}).seconds(StepShape.decode(1, 100))
    for drafter, each in ((None, 0.0), (draft, own)):
        speeds = [sum(0.9**n for n in range(k + 1)) / (step(1 + k) + k * each) for k in range(9)]
        count, rate = drafted(p, drafter, 0.9, 8, 1, 100)
        assert speeds[count] == max(speeds) == pytest.approx(rate.tokens) and rate.tokens > 1 / one
    assert drafted(p, None, 0.0, 8, 1, 100)[0] == drafted(p, None, 0.9, 8, 17, 100)[0] == 0


def test_a_step_of_a_simulation_is_priced():
    p = predictor()
    cost = PredictedStepCost(p)
    assert cost.seconds(StepTotals()) == 0.0
    assert cost.seconds(StepTotals(decodes=2, decode_context=200, outputs=2)) == p.seconds(StepShape.decode(2, 100))
    prompt = StepTotals(prompt_tokens=64, prompt_attended=64 * 100 + 64 * 32, outputs=1)
    assert cost.seconds(prompt) == p.seconds(StepShape.prompt(64, 100))


def test_threads_share_out_rows_and_not_their_elements():
    """One row is normed by each thread for itself; of 4 and of 512 rows each of 4 threads has its part."""

    def norms(threads, shape):
        machine = dataclasses.replace(MACHINE, nodes=1, cores=threads, elementwise=1e3, barrier=())
        return predictor(machine=machine).stages[0].costs[0].step(shape).total  # nothing else takes as long

    one, four = (norms(threads, StepShape.decode(1, 0)) for threads in (1, 4))
    heads = 4 / 3 * (one - four)  # threads divide norms and rotations of heads
    assert heads > 0 and norms(4, StepShape.decode(4, 0)) == pytest.approx(2 * (one - heads) + heads, rel=0.05)
    assert norms(4, StepShape.prompt(512)) == pytest.approx(norms(1, StepShape.prompt(512)) / 4, rel=0.1)


def test_the_thread_with_the_most_tiles_sets_the_time_of_a_product():
    """The output of 1024 rows has 64 tiles: 64 threads have one each, and so has the busiest of 63."""

    def output(threads):
        machine = dataclasses.replace(MACHINE, nodes=1, cores=threads, cache=1e12, cache_bandwidth=1e16, barrier=())
        cost = predictor(machine=machine).stages[0].costs[0]
        (instr,) = [
            i for i, _ in cost.distinct if any(w is not None and "0.self_attn.o_proj" in w.name for w in i.weights)
        ]
        return cost._times(instr, StepShape.prompt(512)).arithmetic

    assert output(63) == pytest.approx(2 * output(64)) and output(33) == pytest.approx(output(63))


def test_experts_that_tokens_share():
    assert experts_hit(8 / 64, 4) == pytest.approx(1 - (7 / 8) ** 4) and experts_hit(2.0, 3) == 1.0
