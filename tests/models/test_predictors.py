"""Layers that predict the token after the next one: their logits, and drafts that change no bit."""

from dataclasses import replace

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.drafting import Drafting
from ckdist.engine.engine import Engine
from ckdist.engine.layer_drafter import LayerDrafter
from ckdist.engine.load_model import load_model
from ckdist.engine.sampler import Sampler
from ckdist.errors import ConfigError
from ckdist.program.step_batch import BLOCK_TOKENS, Batch
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.dtypes import BY_NUMBER, F32
from ckdist.weights.gguf import read_gguf
from ckdist.weights.gguf_writer import GgufTensorToWrite, write_gguf
from ckdist.weights.predictor_weights import open_predictor
from ckdist.weights.tensor_source import StoredTensor
from tests.models.test_drafted_bits import Recorded, requests
from tests.support.paths import GOLDEN
from tests.support.predictors import own_weights, read, with_predictor
from tests.support.situations import driven
from tests.support.thread_ranks import run_threads
from tests.unit.test_drafts import answers

SETTINGS = {"ctx_size": 112, "parallel": 8, "comm_timeout": 30.0, "pipeline_parallel_size": 1, "spec": "mtp"}


def on_ranks(folder, ranks: int, body, threads: int = 1, **settings) -> None:
    """Runs `body(model)` on rank 0 of a job."""
    config = EngineConfig(model=str(folder), **SETTINGS, threads=threads, **settings)

    def rank(world):
        model = load_model(config, world)
        driven(world, model.executable, lambda _: body(model))
        if ranks == 1:
            model.draft.free()
        model.executable.close()

    if ranks == 1:
        rank(SingleWorld())
    else:
        run_threads(ranks, rank)


@pytest.mark.parametrize(
    "family, ranks",
    [("deepseek_v3", 1), ("glm4moe", 2), ("qwen3next", 1), ("mimo_v2_flash", 2), ("qwen2", 1), ("dots3_note", 1)],
)
def test_logits_are_those_of_transformers(family, ranks, tmp_path):
    golden, ids = np.load(GOLDEN / "predictors" / f"{family}.npy"), np.load(GOLDEN / family / "ids.npy")
    blocks = -(-len(ids) // BLOCK_TOKENS)
    table, chunk = np.arange(blocks, dtype=np.int32), np.array([[len(ids), 0, blocks]], np.int32)

    def body(model):
        slots = np.array([[-1, 0, -1, 0]], np.int32) if model.executable.state_slots else None
        model.executable.run(Batch(ids, chunk, table, np.arange(len(ids), dtype=np.int32), slots))
        rows, next_ids = model.executable.output_rows()[: len(ids) - 1].copy(), ids[1:]
        chosen = np.arange(len(next_ids) - len(golden), len(next_ids), dtype=np.int32)
        logits = model.draft.executable.run(
            Batch(next_ids, np.array([[len(next_ids), 0, blocks]], np.int32), table, chosen, embeddings=rows)
        )
        assert np.abs(logits - golden).max() < 3e-3 * np.abs(golden).max()

    folder = with_predictor(GOLDEN / family, tmp_path)
    on_ranks(folder, ranks, body, cache_type_k="f32", cache_type_v="f32")


def gguf_with_layer(path):
    """The GGUF file of GLM-4.5 with the layer of `with_predictor`."""
    golden = GOLDEN / "glm4moe"
    model = read_gguf(golden / "q8_0.gguf")
    layers = model.metadata["glm4moe.block_count"]
    raw = (golden / "q8_0.gguf").read_bytes()

    def tensor(name, stored):
        data = np.frombuffer(raw[stored.offset : stored.offset + stored.nbytes], np.uint8)
        return GgufTensorToWrite(name, BY_NUMBER[stored.type], stored.shape, lambda: [data])

    tensors = [tensor(name, one) for name, one in model.tensors.items()]
    last = {n: one for n, one in model.tensors.items() if n.startswith(f"blk.{layers - 1}.")}
    tensors += [tensor(f"blk.{layers}.{n.split('.', 2)[2]}", one) for n, one in last.items()]
    for name, values in own_weights(64, 0.0).items():
        stored = f"blk.{layers}.nextn.{name.replace('.', '_')}.weight"
        tensors.append(GgufTensorToWrite(stored, F32, values.shape, lambda v=values: [v.view(np.uint8)]))
    counts = {"glm4moe.block_count": layers + 1, "glm4moe.nextn_predict_layers": 1}
    write_gguf(path, model.metadata | counts, tensors)
    return path


def test_the_layer_of_a_gguf_file_is_that_of_the_folder(tmp_path):
    golden = read(with_predictor(GOLDEN / "glm4moe", tmp_path / "folder") / "model.safetensors")
    found = open_predictor(open_checkpoint(gguf_with_layer(tmp_path / "a.gguf")))
    folder = open_predictor(open_checkpoint(tmp_path / "folder"))
    assert found.tensors.keys() == folder.tensors.keys()
    assert {n: one.shape for n, one in found.tensors.items()} == {n: one.shape for n, one in folder.tensors.items()}
    proj = golden["model.layers.3.eh_proj.weight"]
    for one in found, folder:
        assert np.array_equal(read_tensor(one.tensors["model.eproj.weight"]), proj[:, :64])
        assert np.array_equal(read_tensor(one.tensors["model.hproj.weight"]), proj[:, 64:])
        for name in ("enorm", "hnorm"):
            norm = golden[f"model.layers.3.{name}.weight"]
            assert np.array_equal(read_tensor(one.tensors[f"model.{name}.weight"]), norm)
    experts = "model.layers.0.mlp.experts.down_proj.weight"
    near = read_tensor(found.tensors[experts]) - read_tensor(folder.tensors[experts])
    assert np.abs(near).max() < 0.02


@pytest.mark.parametrize(
    "family, ranks",
    [("deepseek_v3", 1), ("qwen3next", 1), ("glm4moe", 3), ("mimo_v2_flash", 1), ("qwen2", 2), ("dots3_note", 1)],
)
def test_no_bit_differs_with_such_a_layer(family, ranks, tmp_path):
    def body(model):
        own, executable = model.draft.executable, model.executable
        vocab = executable.vocab_size
        asked = requests(vocab, 2)[: 8 if ranks == 1 else 2]
        plain, drafted = Recorded(vocab), Recorded(vocab)
        expected = answers(Engine(executable, plain, {2}), asked)
        drafting = Drafting(
            "mtp", 5, by_gain=False, model=LayerDrafter(own, Sampler(vocab, own.worker.pool), vocab, executable)
        )
        engine = Engine(executable, drafted, {2}, make_drafting=lambda: drafting)
        assert answers(engine, asked) == expected
        assert drafted.drawn == plain.drawn
        gain, pool = drafting.gain, drafting.model._pool
        assert gain.accepted > (12 if family == "dots3_note" else 25) and gain.drafted > gain.accepted  # it is tiny
        assert pool.available == pool.num_blocks and not drafting.model._followers

    on_ranks(
        with_predictor(GOLDEN / family, tmp_path, follows=True),
        ranks,
        body,
        2 if family == "deepseek_v3" else 1,
        ubatch_size=48,
    )


def test_a_model_without_such_a_layer_is_refused():
    with pytest.raises(ConfigError, match=r"--spec mtp needs layers that predict tokens, and .*llama3 has none"):
        load_model(EngineConfig(model=str(GOLDEN / "llama3"), **SETTINGS, threads=1), SingleWorld())


def test_layers_that_this_cannot_read_are_refused_and_further_ones_are_named(tmp_path):
    for name in ("nemotron_h_moe", "hy_v4"):  # parts of layers alone, residual streams
        model = open_checkpoint(GOLDEN / name)
        proj = StoredTensor("mtp.layers.0.eh_proj.weight", F32.number, (64, 128), model.path, 0, "F32", 1 << 15)
        with pytest.raises(ConfigError, match=rf"layers of .*{name} that predict tokens .* are not supported"):
            open_predictor(replace(model, unread=(proj,)))
    mimo = open_checkpoint(with_predictor(GOLDEN / "mimo_v2_flash", tmp_path))
    second = replace(mimo.unread[0], name="model.mtp.layers.1.enorm.weight")
    assert not open_predictor(mimo).notes
    (note,) = open_predictor(replace(mimo, unread=(*mimo.unread, second))).notes
    assert note == "--spec mtp reads the first layer that predicts tokens: 1 tensors of others stay unused"
