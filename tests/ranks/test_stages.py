"""Layers divided over stages: the bits of one stage in every situation, over shared memory and transports; which layers
a stage has; and what is refused.
"""

import dataclasses
import itertools
import json
import re
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.single import SingleSequence
from ckdist.engine.stage_ranks import stage_rank
from ckdist.errors import ConfigError, ModelFileError
from ckdist.layout import SINGLE, TENSOR
from ckdist.layouts.stage_plan import divide_layers, even_slices
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward
from ckdist.program.pipeline_stage import Stage
from ckdist.program.tracer import trace
from ckdist.weights.adapter_file import MODULES, Lora, save_adapter
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.packed_type import WeightCost
from tests.support.distinct_families import distinct_families
from tests.support.interpreter import Interpreter
from tests.support.paths import GOLDEN
from tests.support.situations import driven, situations, texts
from tests.support.specs import FAMILIES, PIECES, spec, weights_of
from tests.support.thread_ranks import run_threads


def loaded(world, path, stages: int, **more):
    settings = {"threads": 1, "ubatch_size": 32, "ctx_size": 96, "comm_timeout": 20.0, "cache_type_k": "f32"}
    return load_model(EngineConfig(model=str(path), pipeline_parallel_size=stages, **settings | more), world)


def run(ranks, path, stages: int, body, **more):
    """What `body(model)` gives on rank 0; `ranks`: how many, or the host of each."""

    def rank(world):
        model = loaded(world, path, stages, **more)
        result = driven(world, model.executable, lambda _: body(model))
        model.executable.close()
        return result

    return rank(SingleWorld()) if ranks == 1 else run_threads(ranks, rank)[0]


def generated(model):
    return texts(Engine(model.executable, Sampler(model.spec.vocab_size)))[0]


def logits(model):
    return situations(model.executable)


@pytest.mark.parametrize("folder", distinct_families(), ids=lambda folder: folder.name)
def test_one_text_on_every_stage(folder, tmp_path):
    """As many stages as there are layers, up to three: uneven ones where there are four layers. Two of GLM-5's layers
    share positions, and so a stage; Gemma 4's share keys.
    """
    if folder.name == "gemma3n":
        folder = gemma3n_of_two_groups(tmp_path)
    two = folder.name in ("glm_moe_dsa", "gemma4", "hy_v4", tmp_path.name)
    stages = 2 if two else min(3, len(open_checkpoint(folder).spec.layers))
    assert run(stages, folder, stages, generated) == run(1, folder, 1, generated)


def gemma3n_of_two_groups(folder):
    """The golden model, in which three of the four layers read keys of another one of them."""
    config, tensors = (
        json.loads((GOLDEN / "gemma3n/config.json").read_text()),
        load_file(GOLDEN / "gemma3n/model.safetensors"),
    )
    (folder / "config.json").write_text(json.dumps({**config, "num_kv_shared_layers": 1}))
    own = {name.replace(".0.", ".2."): x for name, x in tensors.items() if re.search(r"rs\.0\..*\.[kv]_", name)}
    save_file({**own, **tensors}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["gemma2", "qwen2moe", "olmo2", "deepseek_v2", "deepseek_v4"])
def test_bits_with_tensors_inside_stages(name):
    """Two ranks in each of two stages, of two and one layers in two of the models, with both forms of prefill."""

    def body(model):
        assert model.executable.layouts == 2
        found = generated(model) if name == "deepseek_v4" else logits(model)  # whose layers have states
        model.executable.prefill_from = sys.maxsize
        return [*found, *(generated(model) if name == "deepseek_v4" else logits(model))]

    expected = run(2, GOLDEN / name, 1, body, prefill="token")
    for a, b in zip(run(4, GOLDEN / name, 2, body, prefill="token"), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "ranks, stages, transport",
    [
        (["one", "two"], 2, "tcp"),
        (2, 2, "tcp"),
        (["one", "two", "one"], 3, "tcp"),
        (["one", "one", "two", "two"], 2, "tcp"),
        (["one", "two", "three", "four"], 2, "tcp"),
        (["one", "one", "one", "two"], 2, "tcp"),
        (5, 1, "auto"),
    ],
)
def test_bits_over_transports(ranks, stages, transport):
    """A stage on a host, stages that share one, and stages over several."""
    count = ranks if isinstance(ranks, int) else len(ranks)
    expected = run(count // stages, GOLDEN / "gemma2", 1, logits)
    for a, b in zip(run(ranks, GOLDEN / "gemma2", stages, logits, transport=transport), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "name, hosts, why_not",
    [
        ("gptoss", "abcd", ""),
        ("qwen3moe", "abab", ""),
        ("deepseek_v2", "aabbccdd", ""),
        ("qwen3moe", "aabaab", "in every step: these are on 2 hosts with 2, 1 ranks each"),
        ("qwen3moe", "abcc", "in every step: stages are on unequal numbers of hosts"),
    ],
)
def test_rows_go_to_the_hosts_of_their_experts_inside_a_stage(name, hosts, why_not, caplog):
    """Whole experts on each host of a stage: the bits of sums. Where hosts have unequal numbers of ranks, or a stage
    has one host, all sum.
    """

    def body(model):
        executable = model.executable
        assert bool(executable.dispatches) != bool(why_not)
        executable.dispatch_from = sys.maxsize
        expected, text = logits(model), generated(model)
        assert executable.dispatched_tokens == 0
        executable.dispatch_from = 2
        found = logits(model)
        assert why_not or executable.dispatched_tokens > 40
        assert generated(model) == text
        return [*zip(found, expected, strict=True)]

    with caplog.at_level("DEBUG", "ckdist"):
        pairs = run(hosts, GOLDEN / name, 2, body, experts="expert", transport="tcp")
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)
    assert ("experts: rows are summed" in caplog.text) == bool(why_not) and why_not in caplog.text


@pytest.mark.parametrize("name", ["Q8_0.gguf", "Q4_K_M.gguf", "BF16.gguf"])
def test_quantised_types_and_an_adapter(name, tmp_path):
    path = GOLDEN / "gguf" / name
    checkpoint, rng = open_checkpoint(path), np.random.default_rng(1)
    shapes = {n: w.shape for n, w in checkpoint.tensors.items() if n.split(".")[-2] in MODULES}
    factors = {}
    for weight, (rows, columns) in shapes.items():
        stem = weight.removesuffix(".weight")
        factors[f"{stem}.lora_A.weight"] = rng.standard_normal((4, columns)).astype(np.float32)
        factors[f"{stem}.lora_B.weight"] = 0.1 * rng.standard_normal((rows, 4)).astype(np.float32)
    save_adapter(tmp_path, Lora(4, 8.0, tuple(MODULES)), "base", factors, checkpoint.spec)
    plain = run(1, path, 1, logits)
    for more in ({}, {"lora": str(tmp_path)}):
        expected = run(1, path, 1, logits, **more)
        for a, b in zip(run(2, path, 2, logits, **more), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    assert not np.array_equal(expected[0], plain[0])


def test_sequences_in_lockstep_and_a_prompt_in_pieces():
    """What `ckdist bench` drives: five sequences in two steps that are under way at once, and a prompt's chunks."""

    def body(model):
        ids = np.random.default_rng(0).integers(0, 100, (4, 5))
        prompt = SingleSequence(model.executable).feed(np.arange(90))
        batch = LockstepSequences(model.executable, 5)
        batch.fill(np.arange(20))
        return np.concatenate([prompt, *(part.copy() for part in batch.run(ids))])

    np.testing.assert_array_equal(run(2, GOLDEN / "qwen3next", 2, body), run(1, GOLDEN / "qwen3next", 1, body))


def test_preemption_and_cancel():
    """Six sequences on a cache for three, one of which is cancelled: the others' texts are those of one stage."""

    def body(model):
        engine, found = Engine(model.executable, Sampler(model.spec.vocab_size)), {}
        for i in range(6):
            engine.add(i, [i + 3] * 20, SamplingParams(max_tokens=40, temperature=1, seed=i, ignore_eos=True))
        steps = 0
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.id, []).extend(output.tokens)
            if (steps := steps + 1) == 12:
                engine.abort(2)
        del found[2]
        return found, engine.stats()["preemptions_total"]

    small = {"kv_memory": 1 << 16}  # of a stage: twelve blocks
    expected, _ = run(1, GOLDEN / "llama3", 1, body)
    found, preemptions = run(2, GOLDEN / "llama3", 2, body, **small)
    assert found == expected and preemptions > 0


@pytest.mark.parametrize("family", [*FAMILIES, *PIECES])
def test_the_interpreter_of_each_stage(family):
    """The definition of stages: what each sends is what the next receives, and the last gives the whole's logits."""
    s = spec(**{**FAMILIES, **PIECES}[family])
    for layout, mesh in ((SINGLE, Mesh()), (TENSOR, Mesh({"tp": 3}))):
        whole = trace(forward, s, layout, mesh)
        weights, ids = weights_of(whole), np.arange(7)
        expected = Interpreter(whole, s, mesh, weights.get).run(ids)
        received = None
        for number, layer in enumerate(range(len(s.layers))):
            stage = Stage(number, len(s.layers), (layer, layer + 1))
            interpreter = Interpreter(stage.program(whole, mesh), s, mesh, weights.get)
            for context in interpreter.contexts:
                context.received = {number - 1: [received]}
            received = interpreter.run(ids)
        np.testing.assert_array_equal(received, expected)


def test_the_text_of_a_stage():
    whole = trace(forward, spec(), TENSOR, Mesh({"tp": 2}))
    first, last = (Stage(i, 2, (i, i + 1)).program(whole, Mesh({"tp": 2})) for i in range(2))
    assert "%sent: f32[tokens, hidden=64] = send(%x.1, to=1, axis=tp)" in str(first)
    assert "%x.1.rows: f32[tokens, hidden=64] partial(tp) = recv(%ids, axis=tp, stage=0)" in str(last)
    names = lambda program: {w.name for w in program.weights}
    assert names(first).isdisjoint(names(last)) and names(first) | names(last) == names(whole)


def test_layers_are_divided_by_what_they_cost():
    rng = np.random.default_rng(0)
    for count, stages in itertools.product((1, 4, 7), (1, 2, 3, 4)):
        if stages > count:
            continue
        costs = rng.integers(1, 20, count).tolist()
        ends = [(*cut, count) for cut in itertools.combinations(range(1, count), stages - 1)]
        sums = [[sum(costs[a:b]) for a, b in itertools.pairwise((0, *e))] for e in ends]
        found = [sum(costs[a:b]) for a, b in even_slices(costs, stages)]
        assert len(found) == stages and max(found) == min(map(max, sums))
    assert even_slices([1.0] * 7, 3) in ([(0, 2), (2, 4), (4, 7)], [(0, 2), (2, 5), (5, 7)], [(0, 3), (3, 5), (5, 7)])


def test_layers_are_divided_for_decode_and_for_prompts():
    """The head is a large part of decode and a small one of a prompt: the last stage has fewer layers."""
    costs = lambda _: WeightCost(1.0, 2)
    specs = [dataclasses.replace(spec(vocab=vocab), layers=spec().layers[:1] * 8) for vocab in (64, 4096)]
    small, large = (divide_layers(trace(forward, s, SINGLE, Mesh()), 2, "avx2", costs) for s in specs)
    assert small == [(0, 4), (4, 8)] and 4 < large[0][1] < 8


def test_layers_that_see_the_same_positions_are_in_one_stage():
    program = trace(forward, open_checkpoint(GOLDEN / "glm_moe_dsa").spec, SINGLE, Mesh())
    divided = lambda count: divide_layers(program, count, "avx2", lambda _: WeightCost(1.0, 2))
    assert divided(2) == [(0, 2), (2, 3)]
    with pytest.raises(ConfigError, match="3 is more than the 2 groups of layers"):
        divided(3)


def test_rank_0_has_the_last_stage():
    def rank(world):
        place = stage_rank(world, [(0, 2), (2, 3), (3, 5)])
        return place.stage.number, place.world.rank, place.world.size, place.previous, place.next

    assert run_threads(6, rank) == [
        (2, 0, 2, 4, -1),
        (2, 1, 2, 5, -1),
        (0, 0, 2, -1, 4),
        (0, 1, 2, -1, 5),
        (1, 0, 2, 2, 0),
        (1, 1, 2, 3, 1),
    ]


def test_each_stage_has_its_own_layers_alone(caplog):
    caplog.set_level("DEBUG")

    def rank(world):
        model = loaded(world, GOLDEN / "qwen3next", 3)
        driven(world, model.executable, lambda _: None)
        layers = {int(m[1]) for key in model.executable.labels[0] if (m := re.match(r"(\d+)$", str(key[1])))}
        sizes = model.weight_bytes, model.executable.kv_bytes
        model.executable.close()
        return sorted(layers), *sizes

    last, first, second = run_threads(3, rank)
    assert sorted(first[0] + second[0] + last[0]) == [0, 1, 2, 3]
    one = loaded(SingleWorld(), GOLDEN / "qwen3next", 1)
    assert sum(size for _, size, _ in (first, second, last)) < 1.2 * one.weight_bytes
    assert max(kv for *_, kv in (first, second, last)) < one.executable.kv_bytes
    one.close()
    assert re.search(r"stage 0 of 3: embedding, layers? 0.*on rank 1\n", caplog.text)
    assert re.search(r"stage 2 of 3: layer.*head.*on rank 0\n", caplog.text)


@pytest.mark.parametrize(
    "ranks, stages, error",
    [
        (3, 2, "--pipeline-parallel-size 2 does not divide 3 ranks: start a multiple of 2 ranks"),
        (1, 2, "--pipeline-parallel-size 2 does not divide 1 rank: start a multiple of 2 ranks"),
        (4, 4, "--pipeline-parallel-size 4 is more than the 2 layers of the model: each stage has at least one layer"),
    ],
)
def test_stages_that_cannot_be(ranks, stages, error):
    with pytest.raises(ConfigError, match=error):
        run(ranks, GOLDEN / "llama3", stages, generated)


def test_another_model_on_a_stage_is_refused():
    def rank(world):
        loaded(world, GOLDEN / ("llama3" if world.rank else "llama2"), 2)

    with pytest.raises(ModelFileError, match=r"rank 1 .*llama3/model.safetensors has 397960 bytes, and on rank 0"):
        run_threads(2, rank)
