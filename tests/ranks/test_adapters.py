"""Adapters that requests name: the bits of each alone in any batch, over ranks and stages; loads while steps run."""

import shutil
import time

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import BUNDLED, load_model
from ckdist.engine.model_engine import make_engine
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import ConfigError, ModelFileError, RequestError, UnknownAdapterError
from ckdist.weights.adapter_file import LATENT, MODULES
from tests.support.adapters import random_adapter
from tests.support.paths import GOLDEN
from tests.support.served import write_tokenizer
from tests.support.thread_ranks import run_threads

safetensors = pytest.importorskip("safetensors.numpy")

PARAMS = SamplingParams(max_tokens=5, temperature=0, logprobs=1, prompt_logprobs=0)
TARGETS = (
    MODULES,
    ("q_proj", "down_proj"),
    MODULES,
    ("v_proj",),
    ("gate_proj",),
    ("up_proj", "o_proj"),
    MODULES,
    MODULES,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Eight adapters of the bundled model, of several ranks, layers and types. alpha / rank is 2, which changes no bits
    of a float16 (a half would, of subnormal numbers).
    """
    made = [tmp_path_factory.mktemp("adapters") / f"a{i}" for i in range(8)]
    for i, folder in enumerate(made):
        rank, dtype = (5, 16, 17, 1, 8, 16, 3, 20)[i], (np.float16, np.float32)[i % 3 > 0]
        random_adapter(folder, str(BUNDLED), TARGETS[i], seed=i, rank=rank, scale=0.05, dtype=dtype, alpha=2 * rank)
    return made


def outputs(engine, requests, together=True):
    """Tokens and log probabilities of (prompt, adapter), (prompt, adapter, scale) or (prompt, {adapter: scale})."""
    found = {}

    def run(count):
        while count:
            for output in engine.step():
                entry = found.setdefault(output.id, [])
                entry += [item for pair in zip(output.tokens, output.logprobs, strict=True) for item in pair]
                entry += output.prompt_logprobs or []
                count -= output.finish_reason is not None

    for number, (prompt, adapter, *scale) in enumerate(requests):
        scales = adapter if isinstance(adapter, dict) else {adapter: (*scale, 1.0)[0]} if adapter else {}
        engine.add(number, prompt, PARAMS, tenant=None, adapters=tuple(scales.items()))
        if not together:
            run(1)
    run(len(requests) if together else 0)
    return [found[number] for number in range(len(requests))]


def on_ranks(ranks, body, model=BUNDLED, **settings):
    """`body(engine, model)` on rank 0."""
    common = {"threads": 1, "ubatch_size": 32, "ctx_size": 96, "comm_timeout": 20.0, "parallel": 16}

    def rank(world):
        loaded = load_model(EngineConfig(model=str(model), **common | settings), world)
        try:
            if world.rank:
                return loaded.work()
            return body(make_engine(loaded)[0], loaded)
        finally:
            loaded.close()

    return rank(SingleWorld()) if ranks == 1 else run_threads(ranks, rank)[0]


def requests_of(names):
    return [([3 + i, *range(4, 12 + 5 * i)], name) for i, name in enumerate(names)]


NAMES = [f"m{i}" for i in range(8)]


def flags(folders):
    return tuple(f"{name}={folder}" for name, folder in zip(NAMES, folders, strict=True))


@pytest.mark.parametrize(
    "ranks, more, fixed",
    [
        (1, {}, (0, 3, 6, 8)),
        (3, {"prefill": "token"}, (0, 8)),
        (2, {"prefill": "tensor"}, (3, 8)),
        (2, {"pipeline_parallel_size": 2}, (6, 8)),
    ],
    ids=["one", "tokens", "tensors", "stages"],
)
def test_eight_adapters_in_one_batch_have_the_bits_of_each_alone(folders, ranks, more, fixed):
    """And of servers that add one of `fixed` for all requests, if its files are of 16 bits. 8 is no adapter. Some
    adapters have several rows.
    """
    requests = requests_of([*NAMES, None, *NAMES[:1] * 3, *NAMES[7:] * 3])
    together, alone = on_ranks(
        ranks,
        lambda engine, _: (outputs(engine, requests), outputs(engine, requests, together=False)),
        lora=flags(folders),
        max_lora_rank=32,
        **more,
    )
    assert together == alone
    for i in fixed:
        lora = {} if i == 8 else {"lora": str(folders[i])}
        expected = on_ranks(ranks, lambda engine, _, i=i: outputs(engine, [(requests[i][0], None)]), **lora, **more)
        assert together[i] == expected[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_latent_projections_have_adapters_per_request(tmp_path, ranks):
    model = shutil.copytree(GOLDEN / "deepseek_dense", tmp_path / "model")
    write_tokenizer(model)
    for seed, name in enumerate(("x", "y")):
        sizes = {"rank": 4 + seed, "alpha": 4 + seed, "scale": 0.1, "dtype": np.float16}
        random_adapter(tmp_path / name, model, (*LATENT, "o_proj"), seed=seed, **sizes)
    requests = requests_of(("x", "y", None))
    together, alone = on_ranks(
        ranks,
        lambda engine, _: (outputs(engine, requests), outputs(engine, requests, together=False)),
        model=model,
        lora=(f"x={tmp_path / 'x'}", f"y={tmp_path / 'y'}"),
        prefill="token",
    )
    assert together == alone
    for i, folders in enumerate([(str(tmp_path / "x"),), (str(tmp_path / "y"),), ()]):
        fixed = lambda engine, _: outputs(engine, [(prompt, None) for prompt, _ in requests], together=False)
        by_all = on_ranks(ranks, fixed, model=model, lora=folders, prefill="tensor")
        assert [found == own for found, own in zip(together, by_all, strict=True)] == [j == i for j in range(3)]


def finish_load(engine, name, folder, **more):
    engine.load_adapter(name, str(folder), **more)
    end = time.monotonic() + 30
    while (load := engine.adapters.take_load()) is None:
        assert time.monotonic() < end, "the load does not end"
        time.sleep(0.002)
    return load


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_slot_is_loaded_while_requests_run_and_kept_until_they_end(folders, ranks):
    prompt = list(range(4, 20))

    def body(engine, _):
        first, second = (outputs(engine, [(prompt, name)])[0] for name in ("m0", "m1"))
        engine.add("runs", prompt, PARAMS, tenant=None, adapters=(("m0", 1.0),))
        begun = engine.step()
        engine.named_adapters().unload("m0")
        with pytest.raises(UnknownAdapterError, match="there is no adapter 'm0'; loaded are 'm1'"):
            engine.add("late", prompt, PARAMS, adapters=(("m0", 1.0),))
        with pytest.raises(RequestError, match="all 2 slots of --max-loras hold adapters, and 1 of them end"):
            engine.load_adapter("m2", str(folders[2]))
        tokens = [t for output in begun for t in output.tokens]
        while engine.has_work:
            tokens += [t for output in engine.step() for t in output.tokens]
        assert tokens == [item for item in first if isinstance(item, int)]
        assert finish_load(engine, "m2", folders[1]).digest
        assert outputs(engine, [(prompt, "m1"), (prompt, "m2")]) == [second, second]
        with pytest.raises(RequestError, match="'m2' is loaded"):
            engine.load_adapter("m2", str(folders[0]))
        engine.named_adapters().unload("m1")
        assert finish_load(engine, "m2", folders[0], replaces=True).digest
        assert outputs(engine, [(prompt, "m2")]) == [first]
        engine.named_adapters().unload("m2")
        assert "--max-lora-rank 20" in finish_load(engine, "m3", folders[7]).reason
        assert engine.adapters.ids() == {}

    flags = (f"m0={folders[0]}", f"m1={folders[1]}")
    on_ranks(ranks, body, lora=flags)


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"lora": ("a=x", "a=y")}, ConfigError, "several are for all requests, or have one name"),
        ({"lora": ("a=x", "y")}, ConfigError, "--lora y is for all requests, and others have names"),
        ({"lora": ("a=x", "b=y"), "max_loras": 1}, ConfigError, "2 adapters have names, and --max-loras is 1"),
        ({"lora": ("a=",)}, ConfigError, "--lora names no folder"),
        ({"lora": ("a=/nowhere",)}, ModelFileError, "/nowhere/adapter_config.json: No such file"),
    ],
)
def test_wrong_flags_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        on_ranks(1, lambda *_: None, **settings)


def test_an_adapter_of_experts_is_refused_by_name(tmp_path):
    with pytest.raises(ModelFileError, match=r"a matrix of experts: start with --lora .*, without a name"):
        on_ranks(1, lambda *_: None, model=GOLDEN / "qwen3moe", lora=(f"a={GOLDEN / 'lora/qwen3moe'}",))


def test_a_scale_has_the_bits_of_an_adapter_saved_with_this_alpha(tmp_path):
    scales = (0.3, -1.7, 1)
    for i, scale in enumerate(scales):
        alpha = {"rank": 6, "alpha": 2.5 * scale, "scale": 0.05, "dtype": (np.float16, np.float32)[i % 2]}
        random_adapter(tmp_path / f"s{i}", str(BUNDLED), MODULES, **alpha)
        random_adapter(tmp_path / f"m{i}", str(BUNDLED), MODULES, **alpha | {"alpha": 2.5})
    prompts = [prompt for prompt, _ in requests_of(range(4))]
    scaled = [(prompts[i], f"m{i}", scale) for i, scale in enumerate(scales)]
    together, alone, saved = on_ranks(
        2,
        lambda engine, _: (
            outputs(engine, [*scaled, (prompts[3], "m0", 2.0), (prompts[3], None)]),
            outputs(engine, scaled, together=False),
            outputs(engine, [(prompts[i], f"s{i}") for i in range(3)]),
        ),
        lora=tuple(f"{kind}{i}={tmp_path / kind}{i}" for kind in "ms" for i in range(3)),
    )
    assert together[:3] == alone == saved
    assert together[3] != together[4]


@pytest.mark.parametrize(
    "ranks, more",
    [(1, {}), (2, {"prefill": "token"})],
    ids=["one", "tokens"],
)
def test_several_adapters_have_the_same_bits_in_any_order_and_batch(folders, ranks, more):
    scales = [{"m0": 0.5, "m1": -2.0}, {"m7": 1.0, "m2": 0.3, "m6": 1.0}, dict.fromkeys(NAMES, 0.25), {"m3": 1.0}]
    prompts = [prompt for prompt, _ in requests_of(range(6))]
    requests = [*zip(prompts, scales, strict=False), (prompts[4], None), (prompts[1], scales[0])]
    flipped = [(p, dict(reversed(used.items())) if used else None) for p, used in requests]
    together, alone, again = on_ranks(
        ranks,
        lambda engine, _: (
            outputs(engine, requests),
            outputs(engine, flipped, together=False),
            outputs(engine, [*reversed(flipped), *requests[:2]]),
        ),
        lora=flags(folders),
        max_lora_rank=32,
        **more,
    )
    assert together == alone == again[len(requests) - 1 :: -1] and again[len(requests) :] == together[:2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_has_the_sum_of_its_adapters(tmp_path, ranks):
    """As a model whose weights have the sum."""
    model = write_tokenizer(shutil.copytree(GOLDEN / "llama3", tmp_path / "model")) or tmp_path / "model"
    scales, weights = {"a": 0.5, "b": -2.0, "c": 1.0}, safetensors.load_file(model / "model.safetensors")
    for seed, (name, scale) in enumerate(scales.items()):
        sizes = {"rank": 4 + seed, "scale": 0.1, "dtype": np.float16}
        added = random_adapter(
            tmp_path / name, model, (MODULES, ("q_proj", "down_proj"), ("o_proj",))[seed], seed, **sizes
        )
        for weight, delta in added.items():
            weights[weight] = np.float32(weights[weight]) + scale * delta
    shutil.copytree(model, tmp_path / "merged")
    safetensors.save_file(weights, tmp_path / "merged/model.safetensors")
    flags, exact = tuple(f"{name}={tmp_path / name}" for name in scales), {"cache_type_k": "f32", "cache_type_v": "f32"}
    prompts = [prompt for prompt, _ in requests_of(range(3))]
    logprobs = lambda found: np.array([item[0] for own in found for item in own if isinstance(item, list)])
    sums = lambda engine, _: logprobs(outputs(engine, [(prompt, scales) for prompt in prompts]))
    plain = lambda engine, _: logprobs(outputs(engine, [(prompt, None) for prompt in prompts]))
    merged = on_ranks(ranks, plain, tmp_path / "merged", **exact)
    assert np.abs(merged - on_ranks(ranks, plain, model, **exact)).max() > 0.1
    np.testing.assert_allclose(on_ranks(ranks, sums, model, lora=flags, **exact), merged, rtol=0, atol=1e-4)


def test_an_adapter_has_a_prefix_of_its_own(folders):
    """And each scale of it, and each set."""
    prompt = list(range(4, 44))

    def cached(engine, *names, scale=1.0):
        params = SamplingParams(max_tokens=1, temperature=0)
        engine.add("x", prompt, params, adapters=[(name, scale) for name in names])
        return next(output.cached_tokens for output in iter(engine.step, None) for output in output)

    def body(engine, _):
        assert [cached(engine, *name) for name in (["m0"], [], ["m1"], ["m0"], ["m2"])] == [0, 0, 0, 32, 32]
        assert [cached(engine, "m0", scale=scale) for scale in (0.5, 0.25, 1.0, 0.5)] == [0, 0, 32, 32]
        assert [cached(engine, *name) for name in (["m0", "m1"], ["m1", "m0"], ["m0", "m2"])] == [0, 32, 0]
        assert cached(engine, "m0", "m1", scale=0.5) == 0

    on_ranks(1, body, lora=(f"m0={folders[0]}", f"m1={folders[1]}", f"m2={folders[0]}"))
