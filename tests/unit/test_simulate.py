"""A server in simulated time: nothing is lost, seeds decide all, and what formulas say of simple cases comes out."""

import csv
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist.errors import ConfigError
from ckdist.plan.fleet import ClosedLoop, Fleet, route, simulate_clients, simulate_requests
from ckdist.plan.lengths import parse_lengths
from ckdist.plan.load import NO_PREFIX, REQUEST, RequestKind, poisson, read_trace
from ckdist.plan.observed import Gaps
from ckdist.plan.replica import Journey, Replica, ServerShape
from ckdist.plan.serving_report import Objective, report
from ckdist.plan.step_cost import LinearStepCost, StepTotals

ROUTERS = "round-robin", "random", "least"
COST = LinearStepCost((1, 64, 512), (0.02, 0.05, 0.4), 1e-3, 1e-8, 1e-6)
SERVER = ServerShape(max_tokens=64, max_sequences=4, context=256, cache_tokens=512, max_waiting=8)
FLEET = Fleet(3, SERVER, COST)


def kind(prompt="uniform:1:200", output="uniform:1:60", prefix_tokens=0, prefixes=1):
    return RequestKind(parse_lengths(prompt), parse_lengths(output), prefix_tokens, prefixes)


def requests(rate=1.0, seconds=60.0, seed=0, **of):
    return poisson(np.random.default_rng(seed), kind(**of), rate, seconds)


def one_by_one(monkeypatch):
    monkeypatch.setattr(Replica, "_decode_on", lambda replica, until: None)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    rate=st.floats(0.1, 8),
    router=st.sampled_from(ROUTERS),
    failure=st.sampled_from([math.inf, 8.0]),
    stages=st.integers(1, 3),
    prefix=st.sampled_from([0, 40]),
)
def test_every_request_ends_once(seed, rate, router, failure, stages, prefix):
    load = requests(rate, 15, seed, prefix_tokens=prefix, prefixes=2)
    server = replace(SERVER, stages=stages, stage_hop=0.001)
    fleet = replace(FLEET, router=router, failure_seconds=failure, restart=3.0, server=server, seed=seed)
    seen = simulate_requests(fleet, load, 15)
    rows = seen.table
    assert sorted(rows.arrival) == sorted(load.arrival)
    finished = rows.how == 0
    assert (rows.first[finished] > rows.arrival[finished]).all() and (rows.end >= rows.arrival).all()
    found = report(seen, fleet, 15, Objective())
    assert found["requests"] == len(load) == found["finished"] + found["failed"] + found["refused"]
    assert 0 <= found["utilisation"] <= 1 and (failure < math.inf or found["failures"] == 0)
    gaps = rows.output[finished].sum() - finished.sum()
    if failure == math.inf:
        assert seen.gaps.counts.sum() == gaps
        wanted = np.minimum(load.output, SERVER.context - load.prompt).sum() if not found["refused"] else None
        assert wanted in (None, rows.output.sum())


@pytest.mark.parametrize("router", ROUTERS)
def test_a_seed_decides_everything(router):
    load = requests(3.0)
    fleet = replace(FLEET, router=router, failure_seconds=40.0, restart=3.0)
    first, second = (simulate_requests(fleet, load, 60) for _ in range(2))
    assert first.rows == second.rows and (first.gaps.counts == second.gaps.counts).all()
    other = simulate_requests(replace(fleet, seed=1), load, 60)
    assert other.rows != first.rows


def test_processes_change_nothing(monkeypatch):
    monkeypatch.setattr("ckdist.plan.fleet.LEAST_REQUESTS", 1)
    alone, beside = (simulate_requests(replace(FLEET, jobs=jobs), requests(2.0), 60) for jobs in (1, 2))
    assert alone.rows == beside.rows and alone.busy == beside.busy


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30), rate=st.floats(0.05, 6), prefix=st.sampled_from([0, 40]))
def test_stretches_of_decode_are_what_single_steps_are(seed, rate, prefix):
    load = requests(rate, 20, seed, prefix_tokens=prefix, prefixes=2)
    fleet = replace(FLEET, failure_seconds=12.0, restart=2.0)
    quick = simulate_requests(fleet, load, 20)
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch)
        slow = simulate_requests(fleet, load, 20)
    assert np.allclose(np.array(quick.rows), np.array(slow.rows), atol=1e-6)
    assert (quick.steps, quick.preemptions, quick.failures) == (slow.steps, slow.preemptions, slow.failures)
    for name in ("busy", "waiting", "running"):
        assert getattr(quick, name) == pytest.approx(getattr(slow, name), abs=1e-6)
    assert quick.gaps.counts.sum() == slow.gaps.counts.sum()
    assert np.abs(np.cumsum(quick.gaps.counts - slow.gaps.counts)).max() <= 0.02 * quick.gaps.counts.sum() + 2


def test_an_empty_server_answers_as_fast_as_it_computes():
    replica = Replica(SERVER, COST)
    replica.add(Journey(5.0), 100, 3)
    while replica.advance(math.inf):
        pass
    ((arrival, first, end, *counts),) = replica.seen.rows
    pieces = StepTotals(64, 64 * 65 // 2), StepTotals(36, 36 * 64 + 36 * 37 // 2, outputs=1)
    assert first - arrival == pytest.approx(sum(map(COST.seconds, pieces)))
    decoded = [StepTotals(decodes=1, decode_context=n, outputs=1) for n in (101, 102)]
    assert end - first == pytest.approx(sum(map(COST.seconds, decoded))) and counts == [100, 3, 0, 0]


@pytest.mark.parametrize("router", ROUTERS)
def test_a_front_end_is_added_to_every_wait(router):
    load = requests(3.0)
    plain, behind = (
        simulate_requests(replace(FLEET, router=router, server=replace(SERVER, front_end=wait)), load, 60).table
        for wait in (0.0, 0.25)
    )
    assert np.allclose(np.sort(behind.first - behind.arrival), np.sort(plain.first - plain.arrival) + 0.25)


def test_waiting_is_that_of_the_formula_for_one_server_and_equal_requests():
    """M/D/1: the mean wait in the queue is rho * service / (2 * (1 - rho)), Pollaczek (1930) and Khinchine (1932);
    one sequence at once, one step for each request.
    """
    server = ServerShape(max_tokens=64, max_sequences=1, context=64, cache_tokens=64, max_waiting=1 << 20)
    cost, service, rho = LinearStepCost((64,), (0.05,)), 0.05, 0.6
    load = requests(rho / service, 1500.0, prompt="64", output="1")
    load.prompt = 63
    rows = simulate_requests(Fleet(1, server, cost), load, 1500.0).table
    wait = float((rows.first - rows.arrival).mean()) - service
    assert wait == pytest.approx(rho * service / (2 * (1 - rho)), rel=0.05)


def test_more_bandwidth_is_never_slower():
    """Twice the speed of all that is priced; of equal requests, so that no order of arrival matters."""
    load = requests(2.0, prompt="100", output="30")
    fast = replace(COST, seconds_of=tuple(s / 2 for s in COST.seconds_of), per_output=5e-4, per_decode_context=5e-7)
    slow, quick = (simulate_requests(replace(FLEET, cost=cost), load, 60) for cost in (COST, fast))
    found = [report(seen, FLEET, 60, Objective(0.5, 0.05)) for seen in (slow, quick)]
    for name in ("first_token", "between_tokens", "request"):
        assert all(found[1][name][part] <= found[0][name][part] for part in ("p50", "p95"))
    assert found[1]["goodput"] >= found[0]["goodput"] and found[1]["utilisation"] < found[0]["utilisation"]


def test_a_prefix_is_computed_once():
    replica = Replica(SERVER, COST)
    for at in (0.0, 10.0):
        while replica.advance(at):
            pass
        replica.add(Journey(at), 100, 2, 7, 90)
    while replica.advance(math.inf):
        pass
    assert [row[5] for row in replica.seen.rows] == [0, 80]  # five whole blocks of 16


def test_a_failure_ends_what_runs_and_the_cache():
    replica = Replica(SERVER, COST, failures=[10.0], restart=5.0)
    for at in (0.0, 9.95, 12.0, 16.0):
        while replica.advance(at):
            pass
        replica.add(Journey(at), 100, 6, 7, 90)
    while replica.advance(math.inf):
        pass
    ended = {row[0]: (row[5], row[6]) for row in replica.seen.rows}
    assert ended == {0.0: (0, 0), 9.95: (80, 1), 12.0: (0, 2), 16.0: (0, 0)}


def test_routers_know_who_is_down():
    fleet = replace(FLEET, failure_seconds=30.0, restart=10.0)
    downs = [fleet.failures(replica, 200.0) for replica in range(3)]
    is_down = lambda replica, t: any(at <= t < at + 10 for at in downs[replica])
    arrival = np.linspace(0, 200, 500)
    for router in ("round-robin", "random"):
        chosen = route(replace(fleet, router=router), arrival, 200.0)
        wrong = [t for replica, t in zip(chosen, arrival, strict=True) if is_down(int(replica), t)]
        assert wrong == [t for t in arrival if all(is_down(replica, t) for replica in range(3))]


def test_the_least_busy_replica_is_chosen():
    """Of two, one with a long request: the next ones go to the other."""
    rows = [(0.0, 200, 56, NO_PREFIX, 0), *((at, 8, 2, NO_PREFIX, 0) for at in (1.0, 2.5, 4.0))]
    load = np.array(rows, REQUEST).view(np.recarray)
    slow = replace(COST, seconds_of=(0.5, 0.5, 0.5))
    rows = simulate_requests(Fleet(2, SERVER, slow, "least"), load, 5).rows
    waits = {row[0]: row[1] - row[0] for row in rows}
    assert [waits[at] for at in (1.0, 2.5, 4.0)] == pytest.approx([0.5] * 3, abs=0.01)


def test_clients_wait_for_their_answers():
    loop = ClosedLoop(6, kind("50", "10"), think=0.5)
    seen = simulate_clients(FLEET, loop, 60.0)
    rows = seen.table
    assert max(((rows.arrival <= t) & (rows.end > t)).sum() for t in np.linspace(1, 59, 200)) <= 6
    cycle = float((rows.end - rows.arrival).mean()) + loop.think
    assert len(rows.how) == pytest.approx(6 * 60 / cycle, rel=0.1)
    assert seen.rows == simulate_clients(FLEET, loop, 60.0).rows


def test_a_sample_is_a_part_of_the_whole():
    load = requests(3.0)
    whole, part = (simulate_requests(replace(FLEET, sample=sample), load, 60) for sample in (0, 1))
    assert part.rows == whole.rows[: len(part.rows)]
    found = report(part, replace(FLEET, sample=1), 60, Objective())
    assert found["replicas_simulated"] == 1 and found["requests"] == 3 * len(part.rows)


def test_quantiles_of_gaps_are_good_to_a_bin():
    gaps, rng = Gaps(), np.random.default_rng(0)
    values = rng.lognormal(-3, 1, 5000)
    for value in values:
        gaps.add(float(value))
    for part in (0.5, 0.95):
        assert gaps.quantile(part) == pytest.approx(np.quantile(values, part), rel=0.01)
    gaps = Gaps()
    gaps.add_line(0.1, 0.3, 201, 2)
    assert gaps.counts.sum() == 402 and gaps.quantile(0.5) == pytest.approx(0.2, rel=0.01)
    assert Gaps().quantile(0.5) is None


@pytest.mark.parametrize(
    "text", ["", "x", "0", "1e99", "uniform:5", "uniform:9:5", "lognormal:10:9", "exponential:nan", "512:3", "uniform"]
)
def test_lengths_that_are_none(text):
    with pytest.raises(ValueError):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["512", "uniform:100:300", "exponential:200", "lognormal:100:0.5"])
def test_lengths_have_their_mean(text):
    lengths = parse_lengths(text)
    drawn = lengths.draw(np.random.default_rng(0), 20000)
    assert drawn.min() >= 1 and drawn.mean() == pytest.approx(lengths.mean, rel=0.03)


def test_traces_of_two_kinds(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output,prefix,prefix_tokens\n7,30,4,a,20\n5,20,0,,\n9,40,2,a,20\n")
    found = read_trace(str(path))
    assert found.arrival.tolist() == [0, 2, 4] and found.output.tolist() == [1, 4, 2]
    assert found.prefix.tolist() == [NO_PREFIX, 0, 0] and len(read_trace(str(path), 3.0)) == 2
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    found = read_trace(str(path))
    assert found.arrival.tolist() == pytest.approx([0, 4.314579]) and found.prompt.tolist() == [374, 396]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no column arrival"),
        ("arrival,prompt\n", "has no column output"),
        ("arrival,prompt,output\n", "has no request"),
        ("arrival,prompt,output\nx,1,1\n", "line 2"),
        ("arrival,prompt,output\n1,-5,1\n", "a prompt of -5"),
        ("arrival,prompt,output\n1,5\n", "line 2"),
        ("arrival,prompt,output\ninf,5,5\n", "an arrival of inf"),
        ("arrival,prompt,output,prefix_tokens\n1,5,5,9\n", "a prefix of 9 tokens"),
        (f"arrival,prompt,output\n1,{'5' * 200_000},5\n", "line 1: field larger"),
    ],
)
def test_traces_that_are_none(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    csv.field_size_limit(1 << 17)  # the module's own: data of a training sets another in its process
    with pytest.raises(ConfigError, match=message) as error:
        read_trace(str(path))
    assert "\n" not in str(error.value)


def test_a_simulation_needs_no_server():
    heavy = "zmq", "llguidance", "tokenizers", "uvicorn"
    code = f"import sys, ckdist.plan.fleet; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
