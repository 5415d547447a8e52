"""Sums over hosts in chunks of rows: they travel while the product that makes them still runs, and change no bit."""

import itertools

import numpy as np
import pytest

from ckdist import native
from ckdist.comm import communicator
from ckdist.engine.single import SingleSequence
from ckdist.engine.trace import EVENT
from tests.support.programs.replay import build
from tests.support.situations import driven
from tests.support.thread_ranks import run_threads

lib, ffi = native.lib, native.ffi
ROWS, FEW = 400, 40  # a rank sums ROWS in several chunks, and FEW in one
WIDE = {"hidden": 1024, "heads": 8, "kv_heads": 4, "changes": [{}] * 2}


@pytest.fixture(autouse=True)
def slow_link(monkeypatch):
    """Sums go in chunks, although the link is fast."""
    monkeypatch.setattr(communicator, "CHUNK_SECONDS", 0)


def lanes(trace) -> dict[str, np.ndarray]:
    """The events of each lane of a native trace."""
    room, dropped, found = np.empty(4096, EVENT), ffi.new("int64_t *"), {}
    for lane in range(lib.ckdist_trace_lanes(trace)):
        count = lib.ckdist_trace_read(trace, lane, native.pointer(room, "struct ckdist_trace_event *"), dropped)
        found[ffi.string(lib.ckdist_trace_lane_name(trace, lane)).decode()] = room[:count].copy()
    return found


def prefilled(hosts: str, threads: int, prefill: str = "auto", has_pieces: bool = True):
    """Logits of a prompt in pieces of `FEW` tokens and as a whole, and rank 0's trace of the latter."""
    ids = np.arange(ROWS * hosts.count("a")) % 100

    def rank(world):
        *_, executable, _keep = build(world, "llama", "auto", threads, len(ids), 76, "i16", prefill=prefill, **WIDE)
        executable.prefill_from = 0
        trace = native.new(lib.ckdist_trace_new, 4096)

        def body(executable):
            pieces, whole = SingleSequence(executable), SingleSequence(executable)
            few = [pieces.feed(ids[at : at + FEW]) for at in range(0, len(ids), FEW) if has_pieces]
            executable.trace(trace)
            return [few and np.concatenate(few), whole.feed(ids)], lanes(trace)

        result = driven(world, executable, body)
        executable.close()
        return result

    return run_threads(list(hosts), rank)[0]


@pytest.mark.parametrize(
    "hosts, threads, prefill",
    [("ab", 1, "auto"), ("ab", 10, "auto"), ("abc", 2, "auto"), ("aabb", 2, "tensor"), ("aabbcc", 1, "auto")],
)
def test_chunks_change_no_bit(hosts, threads, prefill):
    (pieces, whole), _ = prefilled(hosts, threads, prefill)
    np.testing.assert_array_equal(pieces, whole)


@pytest.mark.parametrize("hosts", ["ab", "abc", "aabb"])
def test_a_sum_begins_while_its_product_runs(hosts):
    _, traced = prefilled(hosts, 1, has_pieces=False)
    sums, thread = traced["sums between hosts"], traced["thread 0"]
    waits = {e["args"][0]: e for e in thread if e["kind"] == lib.ckdist_trace_exchange}
    begun = {}
    for event in sums:
        begun.setdefault(event["args"][0], []).append(event)
    overlapped = [s for s, chunks in begun.items() if len(chunks) > 1 and chunks[0]["begin"] < waits[s]["begin"]]
    assert len(overlapped) == 4, sums  # of two layers, attention's and the feed-forward network's
    for chunks in begun.values():
        assert [chunk["args"][2] for chunk in chunks] == list(range(len(chunks)))
        assert all(a["end"] <= b["begin"] for a, b in itertools.pairwise(chunks))


def test_a_sum_that_a_fast_link_carries_soon_has_one_chunk(monkeypatch):
    monkeypatch.setattr(communicator, "CHUNK_SECONDS", 60)
    (pieces, whole), traced = prefilled("ab", 2)
    np.testing.assert_array_equal(pieces, whole)
    assert not traced["sums between hosts"]["args"][:, 2].any()


def test_one_host_has_no_sums_between_hosts():
    assert set(prefilled("aa", 2, has_pieces=False)[1]) == {"thread 0", "thread 1"}
