"""Whole experts on hosts: rows that go to the hosts of their experts and come back weighted have the bits of sums over
all hosts, and less is sent.
"""

import sys

import numpy as np
import pytest

from ckdist.engine.single import SingleSequence
from tests.support.programs.replay import build
from tests.support.situations import driven, situations
from tests.support.thread_ranks import run_threads


def with_executable(hosts, family, threads, body, chunk=16, **numbers):
    """What `body(executable)` gives on rank 0 of ranks on `hosts`."""

    def rank(world):
        built = build(world, family, "auto", threads, chunk, 12, "i16", experts="expert", **numbers)
        executable = built[4]
        assert executable.dispatches
        result = driven(world, executable, body)
        executable.close()
        return result

    return run_threads(list(hosts), rank)[0]


MODELS = ("experts", "experts_in_groups", "sinks_and_biases")
JOBS = [
    ("ab", 3, {}),
    ("abc", 1, {}),
    ("abcdefg", 1, {"heads": 4, "kv_heads": 1}),  # of 8 or 9 experts some hosts have two
    ("aabb", 1, {"heads": 8, "kv_heads": 4}),
    ("aabbcc", 2, {"heads": 6, "kv_heads": 6}),
    ("aabb", 2, {"prefill": "tensor"}),  # ranks of a host have the same rows
    ("aaabbb", 1, {"prefill": "tensor", "heads": 6, "kv_heads": 6}),
    ("aabbcc", 1, {"prefill": "tensor", "heads": 6, "kv_heads": 6}),
]


@pytest.mark.parametrize(
    "family, hosts, threads, numbers",
    [(MODELS[(i + more) % 3], *job) for i, job in enumerate(JOBS) for more in (0, 1)],  # two of three for each job
)
def test_bits_are_those_of_sums_over_all_hosts(family, hosts, threads, numbers):
    def both(executable):
        executable.prefill_from = 0
        executable.dispatch_from = sys.maxsize
        expected = situations(executable)
        assert executable.dispatched_tokens == 0
        executable.dispatch_from = 0
        return expected, situations(executable), executable.dispatched_tokens

    expected, found, dispatched = with_executable(hosts, family, threads, both, **numbers)
    assert dispatched > 40
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("hosts, more", [("ab", {}), ("abcd", {}), ("aabb", {"prefill": "tensor"})])
def test_less_is_sent(hosts, more):
    """Of a prompt, although activations for weights of float32 are no smaller than sums, and the last layer sums."""

    def sent(executable):
        counts = []
        for executable.dispatch_from in (sys.maxsize, 0):
            executable.stats(reset=True)
            SingleSequence(executable).feed(np.arange(64))
            counts.append(executable.stats(reset=True).sent)
        return counts

    summed, dispatched = with_executable(hosts, "experts", 1, sent, chunk=64, hidden=256, changes=[{}] * 5, **more)
    assert 0 < dispatched < 0.95 * summed, (summed, dispatched)


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aabb"])
def test_rows_by_expert_are_counted_once(hosts):
    """Of all tokens, whichever rank routes them; tokens sharded over a host's ranks are counted there."""

    def counted(executable):
        executable.prefill_from = executable.dispatch_from = 0
        SingleSequence(executable).feed(np.arange(40))
        executable.prefill_from = executable.dispatch_from = sys.maxsize
        sequence = SingleSequence(executable)
        sequence.feed(np.arange(40))
        sequence.feed([3])  # every thread chooses for itself
        return executable.expert_rows()

    def rank(world):
        built = build(world, "experts", "auto", 2, 64, 12, "i16", experts="expert", heads=8, kv_heads=4)
        result = driven(world, built[4], counted)
        built[4].close()
        return result

    found, alone = (run_threads(list(names), rank)[0] for names in (hosts, "z"))
    assert list(found) == [0, 1]
    for layer, rows in found.items():
        assert rows.sum() == 2 * (40 + 40 + 1) and rows.shape == (9,)
        np.testing.assert_array_equal(rows, alone[layer])
