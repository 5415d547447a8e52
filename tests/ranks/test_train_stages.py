"""Training over stages: one rank's curve with any stages, chunks, replicas and tensors; checkpoints for other meshes;
memory; a lost stage; and what is refused.
"""

import os
import pathlib
import re
import signal
import time

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.errors import ConfigError
from ckdist.mesh import Mesh
from ckdist.train.batch import PackedBatch
from ckdist.train.loss_program import lower_model, trace_model, trainable
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.ranks import TrainingRanks
from ckdist.train.stage import TrainingStage
from ckdist.train.trainer import Trainer, train
from ckdist.train.training_memory import training_bytes
from ckdist.weights.adapter_file import MODULES
from tests.support.curves import WIDE, assert_same_curve, assert_same_tensors, curve, metrics, tensors, wide
from tests.support.launcher import run_ranks
from tests.support.ports import free_port
from tests.support.specs import spec
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import toml
from tests.support.torchrun import finish, secret, start

DEEP = {**WIDE, "num_hidden_layers": 5, "tie_word_embeddings": True}
MICRO = {"gradient_accumulation_steps": 6, "per_device_train_batch_size": 1}


def deep(folder: pathlib.Path, pp: int = 1, v: int = 1, **fields):
    """The same training with so many stages, of `v` chunks each."""
    stages = {"pipeline_parallel_size": pp, "virtual_pipeline_parallel_size": v}
    return wide(folder, **{"model_config": DEEP, **MICRO, **stages, **fields})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Eight steps on one rank: where it wrote."""
    c = deep(tmp_path_factory.mktemp("alone"))
    train(c, world=SingleWorld())
    return pathlib.Path(c.output_dir)


TWO = {"gradient_accumulation_steps": 3}


@pytest.mark.parametrize(
    "pp, v, ranks, fields",
    [
        (2, 1, 2, {}),
        (2, 1, 2, {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 6}),  # messages read in place
        (3, 1, 3, {}),
        (5, 1, 5, {"activation_checkpointing": True}),
        (2, 2, 2, {}),
        (2, 2, 2, {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}),  # filled up to four
        (2, 1, 4, {**TWO, "zero_stage": 1}),
        (2, 2, 4, {"tensor_parallel_size": 2, "activation_checkpointing": True}),
        (2, 1, 8, {**TWO, "tensor_parallel_size": 2}),
    ],
)
def test_one_ranks_curve_over_stages(alone, tmp_path, pp, v, ranks, fields):
    """Losses, gradient norms, validation, the checkpoint with its optimizer state, and the finished model, of a model
    whose embeddings are tied over the stages.
    """
    c = deep(tmp_path / "stages", pp, v, **fields)
    reports = curve(c, ranks)
    out = pathlib.Path(c.output_dir)
    assert_same_curve(metrics(out), metrics(alone))
    assert all(report.bubble_formula == (pp - 1) / report_batches(c, pp) for report in reports)
    for name in ("checkpoint-8", "model"):
        assert_same_tensors(out / name, alone / name)


def report_batches(c, pp: int) -> int:
    """Batches of a replica in a step, times the chunks of a stage."""
    return c.gradient_accumulation_steps * c.virtual_pipeline_parallel_size


def test_no_tied_embeddings_and_batches_of_ones_own(tmp_path):
    """More batches in a step than the configuration says, and one in the next; learning without clipping."""

    def batches(step, rank, size):
        rng = np.random.default_rng((step, rank))
        draw = lambda: rng.integers(1, 200, 32).astype(np.int32)
        return [PackedBatch(draw(), draw(), np.array([0, 20, 32])) for _ in range(1 if step % 2 else 7)]

    model = {**DEEP, "tie_word_embeddings": False, "vocab_size": 300}
    more = {"model_config": model, "max_grad_norm": 0.0, "max_steps": 4, "gradient_accumulation_steps": 1}

    def trained(pp, v):
        """Where ranks wrote who all have the source."""
        c = deep(tmp_path / f"{pp} {v}", pp, v, **more)

        def body(world):
            trainer = Trainer(c, world, batches)
            trainer.run((), None)
            trainer.close()

        run_threads(pp, body)
        return metrics(pathlib.Path(c.output_dir))

    expected = trained(1, 1)
    for pp, v in ((3, 1), (2, 2)):
        assert_same_curve(trained(pp, v), expected)


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 40,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 6,
}


HYBRID = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}


@pytest.mark.parametrize(
    "model, ranks, fields",
    [
        (EXPERTS, 2, {}),
        (EXPERTS, 4, {"tensor_parallel_size": 2}),
        (LATENT, 2, {}),
        (HYBRID, 4, {"tensor_parallel_size": 2, "activation_checkpointing": True}),
    ],
)
def test_layers_of_other_kinds(tmp_path, model, ranks, fields):
    model, few = {**DEEP, **model}, {"max_steps": 4}  # further ones magnify what another order of sums changes
    train(deep(tmp_path / "alone", model_config=model, **few), world=SingleWorld())
    c = deep(tmp_path / "stages", 2, model_config=model, **few, **fields)
    curve(c, ranks)
    assert_same_curve(metrics(pathlib.Path(c.output_dir)), metrics(tmp_path / "alone" / "out"))


@pytest.mark.parametrize(
    "pp, ranks, dense, fields",
    [
        (2, 2, [], {}),
        (2, 4, [], {"tensor_parallel_size": 2, "virtual_pipeline_parallel_size": 2}),
        (5, 5, [0, 3, 4], {"activation_checkpointing": True}),  # the first and the last stages have none
    ],
)
def test_experts_are_balanced_over_all_stages_together(tmp_path, pp, ranks, dense, fields):
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "mlp_only_layers": dense}
    model = {**DEEP, **EXPERTS, **balanced}
    train(deep(tmp_path / "alone", model_config=model), world=SingleWorld())
    c = deep(tmp_path / "stages", **{"pp": pp, "model_config": model, **fields})
    curve(c, ranks)
    found = metrics(pathlib.Path(c.output_dir))
    assert all(line["aux_loss"] > 0 for line in found)
    assert_same_curve(found, metrics(tmp_path / "alone" / "out"))


def test_an_adapter(alone, tmp_path):
    """LoRA on a model whose frozen embeddings the first and the last stage have."""
    more = {"model_config": {}, "model_name_or_path": str(alone / "model"), "lora_r": 4, "max_steps": 3}
    more["lora_target_modules"] = tuple(sorted(MODULES))
    one, two = (deep(tmp_path / f"{pp}", pp, **more) for pp in (1, 2))
    train(one, world=SingleWorld())
    curve(two, 2)
    assert_same_curve(metrics(pathlib.Path(two.output_dir)), metrics(pathlib.Path(one.output_dir)))
    name = "adapter/adapter_model.safetensors"
    assert_same_tensors(pathlib.Path(two.output_dir) / name, pathlib.Path(one.output_dir) / name)


def test_going_on_in_the_same_and_in_another_mesh(alone, tmp_path):
    """The same stages give the bits of never having stopped; other meshes the same curve."""
    whole, parts = (deep(tmp_path / name, 2, 2) for name in ("whole", "parts"))
    expected = curve(whole, 2)
    curve(parts, 2, should_stop=lambda: True)  # after the first
    found = curve(parts, 2)
    assert [(r.step, r.loss, r.grad_norm) for r in found] == [(r.step, r.loss, r.grad_norm) for r in expected[1:]]
    name = "model/model.safetensors"
    for one, other in zip(*(tensors(pathlib.Path(c.output_dir) / name).values() for c in (whole, parts)), strict=True):
        np.testing.assert_array_equal(one, other)
    other = {"zero_stage": 1, **TWO}
    for c, ranks in ((deep(tmp_path / "other", 3), 3), (deep(tmp_path / "other", 2, **other), 4)):
        curve(c, ranks, should_stop=lambda: True)
    train(deep(tmp_path / "other"), world=SingleWorld())
    assert_same_curve(metrics(tmp_path / "other" / "out"), metrics(alone))


@pytest.mark.parametrize("pp, tp, v", [(3, 1, 1), (2, 2, 2)])
def test_processes_under_mpirun(alone, tmp_path, pp, tp, v):
    path = toml(tmp_path, model_config=DEEP, eval_steps=4, virtual_pipeline_parallel_size=v, **MICRO)
    words = ("train", str(path), "-pp", str(pp), "--tensor-parallel-size", str(tp))
    done = run_ranks(pp * tp, "-m", "ckdist.cli.main", *words, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"training over pp {pp}{f' x tp {tp}' * (tp > 1)}\n" in done.stderr
    lines = re.findall(r"stage (\d) of \d \(layers ([\d, to]+)\): .* on each rank", done.stderr)
    assert [int(number) for number, _ in lines] == list(range(pp)), done.stderr
    assert re.search(r"bubble -?\d+% \(\d+% by formula\)", done.stderr)
    assert_same_curve(metrics(tmp_path / "out"), metrics(alone))


def test_processes_over_tcp(alone, tmp_path):
    """Stages that share no memory."""
    path, port = toml(tmp_path, model_config=DEEP, eval_steps=4, **MICRO), free_port()
    words = ["train", str(path), "--pipeline-parallel-size", "3", "--set", "transport=tcp"]
    key = secret(tmp_path)
    for code, _, said in finish([start(r, 3, port, *words, CKDIST_JOB_SECRET_FILE=key) for r in range(3)], 120):
        assert code == 0, said
    assert_same_curve(metrics(tmp_path / "out"), metrics(alone))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_stage_is_one_line(tmp_path, how):
    """Killed, or stopped for longer than ddp_timeout: each other stage names it, and ends."""
    path, port, key = toml(tmp_path, model_config=DEEP, max_steps=100000, save_steps=0, **MICRO), free_port(), None
    key = secret(tmp_path)
    words = ["train", str(path), "-pp", "3", "--set", "transport=tcp", "--set", "ddp_timeout=3"]
    jobs = [start(r, 3, port, *words, CKDIST_JOB_SECRET_FILE=key) for r in range(3)]
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out" / "metrics.jsonl").is_file() or len(metrics(tmp_path / "out")) < 2:
            assert time.monotonic() < deadline and all(job.poll() is None for job in jobs)
            time.sleep(0.05)
        os.kill(jobs[1].pid, how)
        began = time.monotonic()
        for rank in (0, 2):
            said = jobs[rank].communicate(timeout=30)[1]
            assert jobs[rank].returncode == 1 and "Traceback" not in said, said
            assert re.search(r"ckdist: .*rank 1 ", said.splitlines()[-1]), said
        assert time.monotonic() - began < 25
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


def test_planned_memory_is_what_is_taken():
    """Of each stage, what is kept included; the first keeps most."""
    s, kept = spec(layer={}, changes=[{}] * 6), []
    program = trace_model(s, Mesh.of_job(1, 0))
    for rank in range(3):
        mesh = Mesh.of_job(3, rank, pp=3)
        stage = TrainingStage.of(mesh, program, set(trainable(program)), 1, 6)
        lowered = lower_model(s, 64, mesh=mesh, stage=stage)
        shapes = lowered.shards.whole_shapes
        e = NativeExecutable(
            lowered, lambda name, shapes=shapes: np.ones(shapes[name], np.float32), ranks=TrainingRanks(mesh)
        )
        planned = training_bytes(lowered, 0)
        assert planned["activations"] == e.bytes.activations and planned["gradients"] == e.gradients.flat.nbytes
        kept.append(sum(size * n for size, n in zip(lowered.lowered.kept_bytes, stage.waiting, strict=True)))
        e.close()
    assert kept[0] > 1.3 * kept[1] > kept[2] == 0


@pytest.mark.parametrize(
    "pp, fields, message",
    [
        (
            1,
            {"virtual_pipeline_parallel_size": 2},
            r"virtual_pipeline_parallel_size \(2\) divides the layers of stages",
        ),
        (2, {"virtual_pipeline_parallel_size": 3}, r"\(2\) times .* \(3\) is 6, and must be at most 5"),
    ],
)
def test_stages_that_cannot_be_are_one_line(tmp_path, pp, fields, message):
    c = deep(tmp_path / "out", pp, **fields)
    with pytest.raises(ConfigError, match=message):
        run_threads(pp, lambda world: train(c, world=world))
