"""Drafts of real models: rows of a step that verifies drafts have the bits of rows that are decoded one by one."""

import random
import subprocess
import sys

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.drafting import Drafting
from ckdist.engine.engine import Engine
from ckdist.engine.grammars import Grammars
from ckdist.engine.load_model import BUNDLED, load_model
from ckdist.engine.model_drafter import ModelDrafter
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.support.launcher import environment
from tests.support.levels import each
from tests.support.paths import GOLDEN
from tests.support.situations import driven
from tests.support.thread_ranks import run_threads
from tests.unit.test_drafts import GRAMMARS, answers, spoilt

SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 0},
    {"mirostat": 2, "logprobs": 0},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": (), "temperature": 0.7, "logprobs": 0},
    {"temperature": 0.5, "min_tokens": 20, "logprobs": 1},
    {"temperature": 0.0, "spec": "off"},
)
# Dense, mixture, latent and hybrid models on ranks and stages; and a cache of few bits with too little room.
CASES = {
    "llama3": ("llama3", 1, 1, {"threads": 2}),
    "llama3, crowded": (
        "llama3",
        1,
        1,
        {"cache_type_k": "f32", "cache_type_v": "f32", "kv_memory": 96 << 10},
    ),
    "gemma3, 2 ranks": ("gemma3", 2, 1, {}),
    "qwen3moe": ("qwen3moe", 1, 1, {"threads": 2}),
    "mixtral, 3 ranks": ("mixtral", 3, 1, {}),
    "gemma4, crowded": ("gemma4", 1, 1, {"kv_memory": 72 << 10}),
    "gptoss, 2 stages": ("gptoss", 2, 2, {}),
    "deepseek_v3": ("deepseek_v3", 1, 1, {"threads": 2}),
    "deepseek_v2, 2 stages": ("deepseek_v2", 2, 2, {}),
    "mixtral with an adapter": ("mixtral", 1, 1, {"lora": (str(GOLDEN / "lora/mixtral"),)}),
    "llama3 with an adapter, 2 ranks": ("llama3", 2, 1, {"lora": (str(GOLDEN / "lora/llama3-patterns"),)}),
    "qwen35": ("qwen35", 1, 1, {"threads": 2}),
    "qwen3next, 2 ranks": ("qwen3next", 2, 1, {}),
    "deepseek_v4, 2 ranks, crowded": (
        "deepseek_v4",
        2,
        1,
        {"cache_type_k": "f32", "cache_type_v": "f32", "kv_memory": 64 << 10, "ctx_size": 144},
    ),
    "deepseek_v32": ("deepseek_v32", 1, 1, {"threads": 2}),
    "glm_moe_dsa, 2 stages": ("glm_moe_dsa", 2, 2, {}),
    "glm5_next, 2 ranks, crowded": (
        "glm5_next",
        2,
        1,
        {"cache_type_k": "f32", "cache_type_v": "f32", "kv_memory": 64 << 10, "ctx_size": 144},
    ),
    "qwen35moe, 2 stages": ("qwen35moe", 2, 2, {}),
    "qwen4_exp, 2 ranks": ("qwen4_exp", 2, 1, {}),
    "granite4h, 2 ranks, crowded": (
        "granite4h",
        2,
        1,
        {"cache_type_k": "f32", "cache_type_v": "f32", "kv_memory": 64 << 10},
    ),
    "falcon_h1, 2 stages": ("falcon_h1", 2, 2, {}),
    "lfm2": ("lfm2", 1, 1, {"threads": 2}),
    "falcon_mamba": ("falcon_mamba", 1, 1, {"threads": 2}),
    "jamba, 2 ranks": ("jamba", 2, 1, {}),
}


class Recorded(Sampler):
    """Keeps the logits that each token was drawn from."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.drawn: dict[tuple[object, int], bytes] = {}

    def sample(self, logits, rows):
        for row, values in zip(rows, logits, strict=True):
            assert self.drawn.setdefault((row.id, row.length), values.tobytes()) == values.tobytes()
        return super().sample(logits, rows)


def requests(vocab: int, eos: int):
    """Eight at once, with common beginnings."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, vocab - 1, 40).tolist()
    return [
        ([*common[: 5 * id], *rng.integers(3, vocab - 1, 1 + id).tolist()], SamplingParams(48, seed=id, **fields))
        for id, fields in enumerate(SAMPLING)
    ]


def both(executable) -> None:
    """Runs all requests without drafts and with some that are wrong."""
    vocab = executable.vocab_size
    if executable.num_blocks < 150:  # the least --kv-memory has too many of DeepSeek-V4
        executable.num_blocks = min(executable.num_blocks, 28)
    asked = requests(vocab, 2)
    plain, drafted = Recorded(vocab), Recorded(vocab)
    expected = answers(Engine(executable, plain, {2}), asked)
    drafting = spoilt([tokens for tokens, _, _ in expected], random.Random(5), vocab)
    drafting._most = 7
    engine = Engine(executable, drafted, {2}, make_drafting=lambda: drafting)
    assert answers(engine, asked) == expected
    assert drafted.drawn == plain.drawn
    if executable.num_blocks < 30:
        assert engine.scheduler.preemptions > 0
    gain = drafting.gain
    assert gain.accepted > 60 and gain.drafted > gain.accepted


@pytest.mark.parametrize("case", CASES)
def test_no_bit_differs_with_drafts(case):
    name, ranks, stages, more = CASES[case]
    settings = {"threads": 1, "ubatch_size": 48, "ctx_size": 112, "parallel": 8, "comm_timeout": 30.0} | more
    config = EngineConfig(model=str(GOLDEN / name), pipeline_parallel_size=stages, **settings)

    def rank(world):
        model = load_model(config, world)
        driven(world, model.executable, both)
        model.executable.close()

    if ranks == 1:
        rank(SingleWorld())
    else:
        run_threads(ranks, rank)


def test_no_bit_differs_with_grammars_and_calls_of_tools():
    settings = {"threads": 1, "ctx_size": 256, "parallel": 4, "pipeline_parallel_size": 1}
    model = load_model(EngineConfig(**settings), SingleWorld())
    executable, tokenizer = model.executable, tokenizer_of(BUNDLED)
    grammars = Grammars(tokenizer, vocab := executable.vocab_size)
    asked = [
        (tokenizer.encode(text), SamplingParams(60, seed=seed, grammar=grammar, logprobs=0, temperature=float(seed)))
        for text, grammar in zip(("The answer is", "Weather"), GRAMMARS, strict=True)
        for seed in (0, 1)
    ]
    make = lambda sampler, drafting: Engine(
        executable, sampler, tokenizer.eos_token_ids, grammars=grammars, make_drafting=lambda: drafting
    )
    plain, drafted = Recorded(vocab), Recorded(vocab)
    expected = answers(make(plain, None), asked)
    drafting = spoilt([tokens for tokens, _, _ in expected], random.Random(1), vocab)
    assert answers(make(drafted, drafting), asked) == expected
    assert drafted.drawn == plain.drawn and drafting.gain.drafted > drafting.gain.accepted > 20
    model.executable.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_bit_differs_with_a_draft_model_and_its_tokens_are_right(ranks):
    """It is the model itself."""
    settings = {"threads": 1, "ubatch_size": 48, "ctx_size": 112, "parallel": 8, "comm_timeout": 30.0}
    name = str(GOLDEN / "llama3")
    config = EngineConfig(model=name, pipeline_parallel_size=1, model_draft=name, spec="model", **settings)

    def rank(world):
        model = load_model(config, world)
        own = model.draft.executable
        vocab = own.vocab_size

        def run(executable):
            asked = requests(vocab, 2)
            plain, drafted = Recorded(vocab), Recorded(vocab)
            expected = answers(Engine(executable, plain, {2}), asked)
            drafting = Drafting("model", 5, by_gain=False, model=ModelDrafter(own, Sampler(vocab), vocab))
            engine = Engine(executable, drafted, {2}, make_drafting=lambda: drafting)
            assert answers(engine, asked) == expected
            assert drafted.drawn == plain.drawn
            gain = drafting.gain
            assert gain.accepted > 60 and gain.drafted > gain.accepted
            refused = gain.drafted - gain.accepted
            answers(engine, asked[:2])  # at temperature 0
            assert gain.drafted - gain.accepted == refused

        driven(world, model.executable, run)
        if ranks == 1:
            model.draft.free()
        model.executable.close()

    if ranks == 1:
        rank(SingleWorld())
    else:
        run_threads(ranks, rank)


@pytest.mark.parametrize("level", each(("baseline", "avx2")))
def test_no_bit_differs_on_other_levels_of_instructions(level):
    names = ("llama3", "qwen3moe", "deepseek_v3", "qwen35")
    cases = [case for case in CASES if case.startswith(names)]
    code = "import sys\nfrom tests.models import test_drafted_bits\n"
    code += "for case in sys.argv[1:]:\n    test_drafted_bits.test_no_bit_differs_with_drafts(case)"
    env = {**environment(), "CKDIST_ISA": level}
    command = [sys.executable, "-c", code, *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
