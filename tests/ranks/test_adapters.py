"""Adapters that requests name: the bits of each alone in any batch, over ranks and stages; loads while steps run."""


import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import BUNDLED, load_model
from ckdist.engine.model_engine import make_engine
from ckdist.engine.sampling_params import SamplingParams
from ckdist.weights.adapter_file import MODULES
from tests.support.adapters import random_adapter
from tests.support.thread_ranks import run_threads

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
    """Eight adapters of the bundled model, of several ranks and layers."""
    made = [tmp_path_factory.mktemp("adapters") / f"a{i}" for i in range(8)]
    for i, folder in enumerate(made):
        random_adapter(folder, str(BUNDLED), TARGETS[i], seed=i, rank=(5, 16, 17, 1, 8, 16, 3, 20)[i], scale=0.05)
    return made


def outputs(engine, requests, together=True):
    """Tokens and log probabilities of (prompt, adapter)."""
    found = {}

    def run(count):
        while count:
            for output in engine.step():
                entry = found.setdefault(output.id, [])
                entry += [*output.tokens, *output.logprobs, *(output.prompt_logprobs or [])]
                count -= output.finish_reason is not None

    for number, (prompt, adapter) in enumerate(requests):
        engine.add(number, prompt, PARAMS, tenant=None, adapter=adapter)
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
    "ranks, more",
    [(1, {}), (3, {"prefill": "token"}), (2, {"prefill": "tensor"}), (2, {"pipeline_parallel_size": 2})],
    ids=["one", "tokens", "tensors", "stages"],
)
def test_eight_adapters_in_one_batch_have_the_bits_of_each_alone(folders, ranks, more):
    """And of a server that adds the adapter for all requests."""
    requests = requests_of([*NAMES, None])
    together, alone = on_ranks(
        ranks,
        lambda engine, _: (outputs(engine, requests), outputs(engine, requests, together=False)),
        lora=flags(folders),
        max_lora_rank=32,
        **more,
    )
    assert together == alone
    for i in (0, 2, 5, 8):
        fixed = {} if i == 8 else {"lora": str(folders[i])}
        expected = on_ranks(ranks, lambda engine, _, i=i: outputs(engine, [(requests[i][0], None)]), **fixed, **more)
        assert together[i] == expected[0]
