"""The cost model of prefill: bytes by their formula, remote weights, uneven heads, few tokens; neighbouring cores
measure nothing.
"""

import dataclasses

import pytest

from ckdist.engine.start_up import BUNDLED
from ckdist.layout import TENSOR, TOKEN, TOKEN_IN_HOSTS
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward
from ckdist.models.spec import Attention, MoeFfn, Routing
from ckdist.planning import cost as prefill_cost
from ckdist.planning.alike_layers import layers_of
from ckdist.planning.cost import CostModel, RankPlace, nominal, place_of
from ckdist.planning.memory_sizes import state_bytes
from ckdist.planning.paired_test import LEAST_GAIN
from ckdist.planning.prefill import MIXTURE_WORTH_MEASURING, WORTH_MEASURING, predicted_gains, promising
from ckdist.program.cache import CacheArray
from ckdist.program.tracer import trace
from ckdist.topology import read_machine
from ckdist.topology.placement import place_rank, threads_of
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.packed_type import WeightCost
from tests.support.specs import resized
from tests.support.thread_ranks import run_threads
from tests.support.trees.layouts import LAYOUTS

SPEC = open_checkpoint(BUNDLED).spec
LARGE = resized(SPEC, 14336, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128)
SMOLLM2 = resized(SPEC, 1536, hidden_size=576, num_heads=9, num_kv_heads=3)  # 135M
SIZES = [512, 256, 128, 64, 32, 16, 8]
Q4_1, BFLOAT16 = WeightCost(20 / 32, 2), WeightCost(2.0, 1)


def models(spec, places, axes=None, isa="avx512_bf16", weight=Q4_1, machine=None):
    """Of every rank, those of TENSOR and of TOKEN."""
    mesh = axes or {"tp": len(places)}
    programs = [trace(forward, spec, layout, Mesh(mesh)) for layout in (TENSOR, TOKEN_IN_HOSTS if axes else TOKEN)]
    return [
        [
            CostModel(program, Mesh(mesh, rank), places, machine or nominal(isa), lambda name: weight)
            for program in programs
        ]
        for rank in range(len(places))
    ]


def gains(spec, places, axes=None, **more) -> dict[int, float]:
    every = models(spec, places, axes, **more)
    hosts = [place.host for place in places]
    results = run_threads(hosts, lambda world: predicted_gains(world, every[world.rank], SIZES))
    assert all(result == results[0] for result in results)
    return results[0]


def neighbours(ranks: int, threads: int = 1) -> list[RankPlace]:
    return [RankPlace("here", 0, 0, threads, {0: 10})] * ranks


def on(tree: str, ranks: int, tmp_path) -> list[RankPlace]:
    """The places of a host's ranks on one of the machines of `tests/support/trees`."""
    layout = LAYOUTS[tree][0]
    machine = read_machine(
        layout.write(tmp_path / tree.replace(" ", "-")), {}, tuple(range(layout.packages * layout.cores * layout.smt))
    )
    masks = [machine.binding.cpus] * ranks
    places = [place_rank(machine, masks, rank, 4) for rank in range(ranks)]
    return [place_of(machine, "here", place, threads_of(machine, place.share, False)) for place in places]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_are_those_that_ranks_count(ranks):
    """The formulas that `test_token.test_bytes_moved_are_those_of_the_formula` holds against counters."""
    spec = resized(SPEC, num_heads=12, num_kv_heads=12, head_dim=32)
    every = models(spec, neighbours(ranks))
    by_tensor, by_token = (sum(pair[i].moved(48) for pair in every) for i in (0, 1))
    assert by_tensor == 2 * 48 * ranks * (ranks - 1) * spec.hidden_size * 4
    assert by_token == (2 * 12 + 2 * 12) * 32 * 48 * (ranks - 1) * 4 // ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_weights_of_other_ranks_are_counted(ranks):
    """With tokens sharded a rank also reads (P - 1) / P of all weights of a layer; with matrices sharded none."""
    a, ffn, hidden = SPEC.layers[0].mixer, SPEC.layers[0].ffn, SPEC.hidden_size
    elements = hidden * ((2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim + 3 * ffn.intermediate_size)
    for by_tensor, by_token in models(SPEC, neighbours(ranks), weight=BFLOAT16):
        assert by_tensor.weights_moved() == 0
        assert by_token.weights_moved() == pytest.approx(2 * elements * (ranks - 1) / ranks)


def test_a_layer_has_each_of_its_weights_once():
    for layout in (TENSOR, TOKEN):
        names = [
            w.name
            for instr in layers_of(trace(forward, SPEC, layout, Mesh({"tp": 2})))[0][0]
            for w in instr.weights
            if w is not None
        ]
        assert len(names) == len({name.rpartition("layers.")[2].partition(".")[2] for name in names}) == 9
        ((layer, count),) = layers_of(trace(forward, resized(SPEC, layers=1), layout, Mesh({"tp": 2})))
        assert len(layer) > 10 and count == 1


@pytest.mark.parametrize("spec, weight", [(SPEC, BFLOAT16), (SMOLLM2, Q4_1), (LARGE, Q4_1)])
def test_two_neighbouring_cores_measure_nothing(spec, weight):
    found = gains(spec, neighbours(2), weight=weight)
    assert promising(found) == {} and abs(found[512]) < WORTH_MEASURING


def test_of_a_mixture_what_is_not_predicted_to_lose_is_measured():
    layers = tuple(dataclasses.replace(layer, ffn=MoeFfn(8, 256, Routing(2))) for layer in SPEC.layers)
    for spec, mixture in ((dataclasses.replace(SPEC, layers=layers), True), (SPEC, False)):
        assert {model.mixture for model in models(spec, neighbours(2))[0]} == {mixture}
    predicted = {512: 0.001, 256: 0.2, 128: -0.01, 64: 0.3}
    assert promising(predicted, MIXTURE_WORTH_MEASURING) == {512: LEAST_GAIN, 256: 0.2}


def test_weights_on_another_node_cost():
    """Step by step as much memory traffic, but half of the weights are further away."""
    places = lambda distance: [RankPlace("here", rank, rank, 28, {rank: 10, 1 - rank: distance}) for rank in (0, 1)]
    near, far, farther = (models(LARGE, places(distance))[0] for distance in (10, 21, 32))
    for size in SIZES:
        assert near[1].seconds(size) < far[1].seconds(size) < farther[1].seconds(size)
    read = lambda pair: (
        pair[1].seconds(16) - pair[0].seconds(16)
    )  # weights alone: the step is too small for anything else
    assert 0 < read(near) < read(far) < read(farther)
    elements = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
    least = (
        elements * Q4_1[0] / prefill_cost.NODE_READ
    )  # all of a layer at a node's bandwidth, where half of it is one's own
    assert far[1].seconds(16) > least * (0.5 + 0.5 * 2.1) and near[0].seconds(16) < least


def test_sockets_and_neighbours(tmp_path):
    """28 cores on each of two sockets, and as if the other one's memory were as near: token-parallel loses by the way
    to the weights.
    """
    apart = on("two sockets", 2, tmp_path)
    assert [(place.node, place.threads, place.factor(apart[1 - place.node])) for place in apart] == [
        (0, 28, 2.1),
        (1, 28, 2.1),
    ]
    together = [dataclasses.replace(place, distances={0: 10, 1: 10}) for place in apart]
    few = [64, 32, 16]
    assert all(gains(LARGE, apart)[size] < gains(LARGE, together)[size] for size in few)
    assert promising({size: gains(LARGE, apart)[size] for size in few}) == {}
    clusters = on("SNC-4", 8, tmp_path)
    assert len({place.node for place in clusters}) == 8 and {clusters[0].factor(other) for other in clusters} == {
        1.0,
        1.2,
        2.1,
    }


def test_many_ranks_of_a_node_promise_a_gain():
    """Tensor-parallel exchanges grow with the square of the ranks against token-parallel ones."""
    found = [gains(SPEC, neighbours(ranks), weight=BFLOAT16) for ranks in (2, 4, 8)]
    assert found[0][512] < found[1][512] < found[2][512] and min(promising(found[2])) <= 256


def test_what_is_cut_unevenly_or_too_finely():
    uneven = resized(LARGE, num_heads=24, num_kv_heads=3)
    assert (
        gains(uneven, neighbours(2))[512] > gains(LARGE, neighbours(2))[512] + 0.03
    )  # two of three groups of heads on one rank
    assert gains(LARGE, neighbours(2))[8] < -0.5  # four tokens a rank, and the whole matrices


def test_hosts_pay_the_same_link_both_ways():
    places = [RankPlace(host, 0, 0, 4, {0: 10}) for host in "ab" for _ in range(4)]
    axes = {"host": 2, "local": 4}
    tensor, token = models(SPEC, places, axes)[0]
    assert tensor.moved(512) > token.moved(512) > 0
    fast = dataclasses.replace(nominal("avx512_bf16"), link_rate=1e15)
    assert 0 < gains(SPEC, places, axes)[512] < gains(SPEC, places, axes, machine=fast)[512]
    faster = models(SPEC, places, axes, machine=fast)[0]
    assert (
        tensor.seconds(512) - faster[0].seconds(512)
        == pytest.approx(token.seconds(512) - faster[1].seconds(512))
        == pytest.approx(2 * 512 * SPEC.hidden_size * 4 / 1e9)
    )


def test_costs_of_unequal_layers_add_up():
    """The mean layer of a model whose layers differ: what each kind costs, as often as it is there."""
    wide = resized(SPEC, ffn=4 * SPEC.layers[0].ffn.intermediate_size)
    mixed = dataclasses.replace(SPEC, layers=(SPEC.layers[0], wide.layers[0], wide.layers[0], SPEC.layers[0]))
    (((tensor, _),), ((narrow, _),), ((broad, _),)) = (models(spec, neighbours(1))[:1] for spec in (mixed, SPEC, wide))
    expected = (narrow.seconds(64) + 2 * broad.seconds(64)) / 3  # between four attentions
    assert tensor.seconds(64) == pytest.approx(expected)
    assert tensor.relative(64) == pytest.approx(expected / narrow.seconds(64)) and narrow.relative(64) == 1


def test_state_of_a_sequence_is_planned():
    """A mixer that carries a state on, sharded by heads, made here; what fits beside it is less."""

    class Recurrent(Attention):
        def cache(self, sharding):
            heads, _ = sharding.heads(self.num_heads, self.num_kv_heads, 10)
            return dataclasses.replace(super().cache(sharding), state=(CacheArray("state", heads),))

    a = SPEC.layers[0].mixer
    fields = {field.name: getattr(a, field.name) for field in dataclasses.fields(a)}
    layers = (dataclasses.replace(SPEC.layers[0], mixer=Recurrent(**fields)), *SPEC.layers[1:])
    spec = dataclasses.replace(SPEC, layers=layers)
    each = [state_bytes(spec, TENSOR, Mesh({"tp": 2}, rank)) for rank in range(2)]
    assert sum(each) == a.num_heads * 10 * 4 and min(each) > 0
    assert state_bytes(SPEC, TENSOR, Mesh({"tp": 2})) == 0
