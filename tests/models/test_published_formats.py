"""Quantised matrices as safetensors have them: their values against torch, compressed-tensors and transformers; models
that are loaded, streamed to GGUF, and refused.
"""

import functools
import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckdist.comm.world import start_world
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError, ModelFileError, UserError
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_rows, read_tensor
from ckdist.weights.loader import ShardLoader
from ckdist.weights.published import join_tensors
from ckdist.weights.safetensors import read_safetensors
from ckdist.weights.scales import E4M3_VALUES
from ckdist.weights.tensor_source import TensorSource
from tests.models.test_loader import unpacked
from tests.support.checkpoints import WEIGHT, checkpoint_of
from tests.support.launcher import environment
from tests.support.mutations import changes, mutated
from tests.support.paths import GOLDEN
from tests.support.published import (
    CONFIG,
    FORMS,
    MIXTURE,
    packed,
    packed_fp4,
    write_latent,
    write_published,
    write_stacks,
    write_tensors,
)
from tests.support.situations import driven
from tests.support.thread_ranks import run_threads

FILES = sorted((GOLDEN / "formats").glob("*.safetensors"))
METHODS = {
    **dict.fromkeys(("fp8-block", "fp8-matrix", "fp8-row"), FORMS["fp8-block"]),
    **{f"int4-{size}": packed(group_size=size) for size in (32, 128)},
    "mxfp4pack": packed_fp4("mxfp4", 32),
    "nvfp4": packed_fp4("nvfp4", 16),
    "modelopt": FORMS["nvfp4"],
    "mxfp8-1": packed_fp4("mxfp8", 32, num_bits=8, strategy="group", form="mxfp8-quantized"),
    "mxfp8-32": FORMS["fp8-block"] | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
    "gptq-32": FORMS["gptq-32"],
    "gptq-128": FORMS["gptq-32"] | {"group_size": 128, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq-row": FORMS["gptq-32"] | {"group_size": -1, "sym": False},
    **{f"awq-{size}": FORMS["awq-32-zero"] | {"group_size": size} for size in (32, 128)},
    "int4-row": packed(strategy="channel"),
    "mxfp4": {"quant_method": "mxfp4"},
}
VALUES = json.loads((GOLDEN / "formats" / "values.json").read_text())


def digest(values: np.ndarray) -> str:
    """Of float32, whatever the sign of a zero."""
    return hashlib.sha256((values + np.float32(0)).tobytes()).hexdigest()


def sources(path) -> list[TensorSource]:
    """Each matrix of a golden file."""
    (joined,), rest = join_tensors(read_safetensors(path), METHODS["-".join(path.stem.split("-")[:2])], str(path))
    assert not rest
    rows, cols = joined.shape[-2:]
    each = joined.scales.code_bytes(rows * cols)
    return [
        TensorSource(
            WEIGHT, joined.type, (rows, cols), path, joined.offset + i * each,
            scales=replace(joined.scales, places=(place,)),
        )
        for i, place in enumerate(joined.scales.places)
    ]  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_values_are_those_of_the_packages_that_define_them(path):
    found, loaded = [], []
    for source in sources(path):
        found.append(read_tensor(source))
        np.testing.assert_array_equal(read_rows(source, 17, 39), found[-1][17:39])
        loader = ShardLoader(checkpoint_of(path, source), threads=2)
        handle = loader.add_matrix(WEIGHT, [(0, source.shape[0])])
        part = loader.add_matrix(WEIGHT, [(9, 40), (2, 3)], (128, source.shape[1]))
        loader.load(progress=False)
        loader.check()
        loaded.append(unpacked(handle))
        np.testing.assert_array_equal(unpacked(part), np.concatenate([found[-1][9:40], found[-1][2:3]])[:, 128:])
    assert digest(np.array(found)) == digest(np.array(loaded)) == VALUES[path.stem]


def test_deepseek_v4_names_scales_scale_and_has_fp4_in_int8(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "model.safetensors"
    eight = rng.choice(np.flatnonzero(np.isfinite(E4M3_VALUES)), (128, 256)).astype(np.uint8)
    four, exponents = rng.integers(0, 256, (3, 32), np.uint8), rng.integers(118, 124, (3, 2), np.uint8)
    write_tensors(
        path,
        {
            "a.weight": ("F8_E4M3", (128, 256), eight.tobytes()),
            "a.scale": ("F8_E8M0", (1, 2), bytes([120, 125])),
            "b.weight": ("I8", (3, 32), four.tobytes()),
            "b.scale": ("F8_E8M0", (3, 2), exponents.tobytes()),
        },
    )
    joined, rest = join_tensors(read_safetensors(path), FORMS["fp8-block"], str(tmp_path))
    assert rest == {}
    a, b = (
        read_tensor(TensorSource(one.name, one.type, one.shape, path, one.offset, scales=one.scales)) for one in joined
    )
    np.testing.assert_array_equal(a, E4M3_VALUES[eight] * np.repeat(np.exp2([-7.0, -2.0]), 128).astype(np.float32))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.stack([four & 15, four >> 4], axis=-1).reshape(3, 64)
    means = np.concatenate([values, -values])[codes] * np.repeat(np.exp2(exponents - 127.0), 32, axis=1)
    np.testing.assert_array_equal(b, means.astype(np.float32))


def logits(folder, world=None, **more) -> np.ndarray:
    """Of some tokens, by one rank, or on rank 0 of a world."""
    settings = {"threads": 1, "ctx_size": 64, "cache_type_k": "f32", "cache_type_v": "f32", **more}
    config = EngineConfig(model=str(folder), **settings)
    model = load_model(config, world or start_world())
    feed = lambda executable: SingleSequence(executable).feed(np.arange(40) % model.spec.vocab_size)
    try:
        return driven(world, model.executable, feed) if world else feed(model.executable)
    finally:
        model.close()


@pytest.mark.parametrize("config", [CONFIG, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("form", [form for form in FORMS if not form.endswith("order")])
def test_a_quantised_model_has_the_logits_of_its_values(tmp_path, form, config):
    write_published(tmp_path, form, config)
    ours, plain = logits(tmp_path / "quantised", threads=2), logits(tmp_path / "plain")
    rms = np.sqrt(np.mean((ours - plain) ** 2)) / np.sqrt(np.mean(plain**2))
    assert rms < (0.01 if form.startswith("fp8") else 0.03)  # activations of bfloat16, or of 8 bits
    np.testing.assert_array_equal(ours, logits(tmp_path / "quantised", repack="off"))
    requantised = logits(tmp_path / "quantised", quantize="q8_0")
    assert np.sqrt(np.mean((requantised - plain) ** 2)) < 0.05 * np.sqrt(np.mean(plain**2))
    for ranks in () if form.startswith(("fp8", "int4")) else (3,) if config is MIXTURE else (2, 3):
        shared = run_threads(ranks, lambda world: logits(tmp_path / "quantised", world))[0]
        assert np.sqrt(np.mean((shared - ours) ** 2)) < 0.01 * np.sqrt(np.mean(ours**2))


def test_groups_of_128_columns_on_ranks(tmp_path):
    """Three ranks divide 512 columns within groups."""
    write_published(tmp_path, "gptq-128", CONFIG | {"intermediate_size": 512})
    ours, plain = logits(tmp_path / "quantised"), logits(tmp_path / "plain")
    assert np.sqrt(np.mean((ours - plain) ** 2)) < 0.03 * np.sqrt(np.mean(plain**2))
    for ranks in (2, 3):
        shared = run_threads(ranks, lambda world: logits(tmp_path / "quantised", world))[0]
        assert np.sqrt(np.mean((shared - ours) ** 2)) < 0.01 * np.sqrt(np.mean(ours**2))


@pytest.mark.parametrize("group", [32, 128])
def test_columns_in_an_order_of_their_own(tmp_path, group):
    """Activations follow the order; shards of the columns, and experts, are refused."""
    write_published(tmp_path, f"gptq-{group}-order", CONFIG | {"intermediate_size": 512 if group == 128 else 416})
    ours, plain = logits(tmp_path / "quantised"), logits(tmp_path / "plain")
    assert np.sqrt(np.mean((ours - plain) ** 2)) < 0.03 * np.sqrt(np.mean(plain**2))
    np.testing.assert_array_equal(ours, logits(tmp_path / "quantised", repack="off"))
    before, after = (open_checkpoint(tmp_path / kind).tensors for kind in ("plain", "quantised"))
    for name, source in before.items():
        np.testing.assert_array_equal(read_tensor(after[name]), read_tensor(source), err_msg=name)
    with pytest.raises(ConfigError, match="use -pp with a stage for each rank"):
        run_threads(2, lambda world: logits(tmp_path / "quantised", world))
    staged = run_threads(2, lambda world: logits(tmp_path / "quantised", world, pipeline_parallel_size=2))[0]
    assert np.sqrt(np.mean((staged - ours) ** 2)) < 1e-4 * np.sqrt(np.mean(ours**2))
    write_published(tmp_path / "experts", "gptq-32-order", MIXTURE)
    with pytest.raises(ModelFileError, match="which experts cannot have"):
        open_checkpoint(tmp_path / "experts" / "quantised")


@pytest.mark.parametrize("form", ["fp8-block", "int4-32"])
def test_latent_attention_of_quantised_matrices(tmp_path, form):
    """Every projection in blocks of 8-bit floats as of DeepSeek-V3, and experts of 4 bits as of Kimi-K2.5."""
    write_latent(tmp_path, form)
    ours, plain = logits(tmp_path / "quantised"), logits(tmp_path / "plain")
    rms = np.sqrt(np.mean((ours - plain) ** 2)) / np.sqrt(np.mean(plain**2))
    assert rms < (0.01 if form.startswith("fp8") else 0.03)  # activations of bfloat16, or of 8 bits
    np.testing.assert_array_equal(ours, logits(tmp_path / "quantised", repack="off"))
    before, after = (open_checkpoint(tmp_path / kind).tensors for kind in ("plain", "quantised"))
    for name, source in before.items():
        np.testing.assert_array_equal(read_tensor(after[name]), read_tensor(source), err_msg=name)
    for ranks in (2, 3):  # which no block of 128 columns divides evenly
        shared = run_threads(ranks, lambda world: logits(tmp_path / "quantised", world))[0]
        assert np.sqrt(np.mean((shared - ours) ** 2)) < 0.01 * np.sqrt(np.mean(ours**2))


def test_export_holds_a_few_rows_at_a_time(tmp_path):
    """Matrices of 16 MB in float32: whole, with what is made of them, they would take 58 MB."""
    write_published(tmp_path, "fp8-block", CONFIG | {"intermediate_size": 16384, "num_hidden_layers": 1})
    code = f"""
import re
import ckdist.cli.main
from ckdist.weights import gguf_export as export
export.tokenizer_metadata = lambda *_: {{}}
largest = lambda: int(re.search("VmHWM: *(.*) kB", open("/proc/self/status").read())[1])
before = largest()
export.export_gguf({str(tmp_path / "quantised")!r}, {str(tmp_path / "out.gguf")!r}, "q8_0")
print(largest() - before)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and int(done.stdout) < 40_000, done.stdout + done.stderr
    before, after = open_checkpoint(tmp_path / "plain"), open_checkpoint(tmp_path / "out.gguf")
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        a, b = read_tensor(before.tensors[name]), read_tensor(after.tensors[name])
        assert np.linalg.norm(a - b) < 6e-3 * np.linalg.norm(a)


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory):
    """The folder of a model of one layer, by its form, which examples read."""

    @functools.cache
    def written(form, mixture=False):
        folder = tmp_path_factory.mktemp("undamaged")
        if form == "mxfp4":
            write_stacks(folder)
        else:
            write_published(folder, form, (MIXTURE if mixture else CONFIG) | {"num_hidden_layers": 1})
        return folder / "quantised"

    return written


def quantised_by(method: dict, given, folder):
    """`folder` with the tensors of `given`, which its config says to be quantised by another method."""
    config = json.loads((given / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(given / "model.safetensors")
    return folder


def stored(path) -> dict:
    """Name to dtype, shape and contents of the tensors of a file."""
    held = path.read_bytes()
    return {t.name: (t.dtype, t.shape, held[t.offset : t.offset + t.nbytes]) for t in read_safetensors(path).values()}


def edited(tensors: dict, name: str, dtype=None, shape=None, data=None) -> None:
    """Another dtype, shape or contents of a tensor."""
    old = tensors[name]
    tensors[name] = (dtype or old[0], shape or old[1], data or old[2])


Q = "model.layers.0.self_attn.q_proj.weight"
G = Q.removesuffix("weight")
NAN = b"\xff\xff"


@pytest.mark.parametrize(
    ("form", "edit", "message"),
    [
        ("fp8-block", lambda t: t.pop(Q + "_scale_inv"), "has no"),
        ("fp8-block", lambda t: t.pop(Q), "whose others are missing"),
        ("fp8-block", lambda t: edited(t, Q + "_scale_inv", shape=(4, 1)), "of blocks of"),
        ("fp8-block", lambda t: edited(t, Q, dtype="F8_E5M2"), "whose others are missing"),
        ("fp8-block", lambda t: edited(t, Q + "_scale_inv", data=NAN * 4), "no finite number"),
        ("fp8-block", lambda t: edited(t, Q, data=b"\x7f" * len(t[Q][2])), "no finite number"),
        ("fp8-row", lambda t: edited(t, Q + "_scale", shape=(2, 128)), "blocks of"),
        ("fp8-row", lambda t: edited(t, Q + "_scale", dtype="F16", data=b"\x00\x7c" * 256), "no finite number"),
        ("int4-32", lambda t: t.pop(Q + "_scale"), "has no"),
        ("int4-32", lambda t: t.pop(Q + "_shape"), "has no"),
        ("int4-32", lambda t: t.pop(Q + "_packed"), "whose others are missing"),
        ("int4-32", lambda t: edited(t, Q + "_shape", data=np.array([256, 512], "<i8").tobytes()), "says (256, 512)"),
        ("int4-32", lambda t: edited(t, Q + "_packed", shape=(128, 64)), "holds"),
        ("int4-32", lambda t: edited(t, Q + "_scale", shape=(128, 16)), "needs"),
        ("int4-32", lambda t: edited(t, Q + "_scale", dtype="I16"), "dtype"),
        ("int4-32", lambda t: edited(t, Q + "_scale", data=NAN * 2048), "no finite number"),
        ("int4-32-zero", lambda t: edited(t, Q + "_zero_point", shape=(8, 32)), "needs"),
        ("int4-32", lambda t: t.update({Q + "_g_idx": ("I32", (256,), bytes(1024))}), "each group 32 times"),
        ("gptq-32", lambda t: t.pop(G + "qzeros"), "has no"),
        ("gptq-32", lambda t: t.pop(G + "qweight"), "whose others are missing"),
        (
            "gptq-32",
            lambda t: edited(t, G + "g_idx", data=np.arange(256, dtype="<i4").tobytes()),
            "each group 32 times",
        ),
        ("gptq-32", lambda t: edited(t, G + "g_idx", shape=(16, 16)), "must be (256,)"),
        ("gptq-32", lambda t: edited(t, G + "scales", shape=(256, 8)), "needs (256 / group, 256)"),
        ("gptq-32", lambda t: edited(t, G + "qweight", shape=(8192,)), "it must be I32"),
        ("gptq-32", lambda t: edited(t, G + "qzeros", data=b"\x77" * 1023 + b"\x87"), "does not keep"),
        ("awq-32-zero", lambda t: edited(t, G + "scales", data=b"\x00\x7c" * 2048), "no finite number"),
        ("awq-32-zero", lambda t: edited(t, G + "qzeros", shape=(32, 8)), "needs (8, 32)"),
        ("nvfp4", lambda t: t.pop(Q + "_scale"), "has no"),
        ("nvfp4", lambda t: edited(t, Q + "_scale", shape=(16, 256)), "needs (256, 16)"),
        ("nvfp4", lambda t: edited(t, Q + "_scale", data=b"\x80" * 4096), "no finite number"),
        ("nvfp4", lambda t: edited(t, Q + "_scale_2", data=np.float32(-1).tobytes()), "must be above 0 and below 256"),
        ("nvfp4", lambda t: edited(t, Q, shape=(128, 256)), "needs (128, 32)"),
    ],
)
def test_parts_that_lie_are_named_in_one_line(undamaged, tmp_path, form, edit, message):
    given = undamaged(form)
    shutil.copy(given / "config.json", tmp_path)
    tensors = stored(given / "model.safetensors")
    edit(tensors)
    write_tensors(tmp_path / "model.safetensors", tensors)
    for repack in ("off", "threads"):
        with pytest.raises(ModelFileError) as error:
            logits(tmp_path, repack=repack)
        assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "aqlm"}, "which is not read"),
        (FORMS["gptq-32"] | {"bits": 8}, "bits is '8'"),
        (FORMS["gptq-32"] | {"checkpoint_format": "marlin"}, "of gptq in form 'marlin'"),
        (FORMS["awq-32-zero"] | {"version": "gemv"}, "of awq in form 'gemv'"),
        (FORMS["nvfp4"] | {"quant_algo": "FP8"}, "modelopt to 'FP8'"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
        ({"quant_method": "fp8", "weight_block_size": [128, 48]}, "multiples of 32"),
        ({"quant_method": "fp8", "weight_block_size": "x"}, "multiples of 32"),
        (FORMS["int4-32"] | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (FORMS["int4-32"] | {"config_groups": 7}, "config_groups"),
        (FORMS["int4-32"] | {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}}, "num_bits"),
        (FORMS["int4-32"] | {"format": "marlin-24"}, "marlin-24"),
    ],
)
def test_what_is_not_read_is_refused_in_one_line(undamaged, tmp_path, change, message):
    with pytest.raises(ModelFileError) as error:
        open_checkpoint(quantised_by(change, undamaged("fp8-block"), tmp_path))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("int4-32", packed(group_size=128), "has scales of 32 columns, but group_size is 128"),
        ("int4-32", packed(group_size=64.0), "has scales of 32 columns, but group_size is 64.0"),
        ("int4-32", packed(strategy="channel"), "has scales of 32 columns, but group_size is None"),
        ("int4-32", packed(group_size=[32]), r"but group_size is [32]"),
        ("int4-row-zero", packed(group_size=32), "has scales of 256 columns, but group_size is 32"),
        ("gptq-32", FORMS["gptq-32"] | {"group_size": 64}, "has 8 groups of 256 columns, but group_size is 64"),
        ("awq-32-zero", FORMS["awq-32-zero"] | {"group_size": "x"}, "has 8 groups of 256 columns, but group_size is x"),
        ("fp8-block", FORMS["fp8-block"] | {"weight_block_size": [64, 128]}, "needs (4, 2) of blocks of (64, 128)"),
    ],
)
def test_sizes_of_groups_that_lie(undamaged, tmp_path, form, change, message):
    with pytest.raises(ModelFileError) as error:
        open_checkpoint(quantised_by(change, undamaged(form), tmp_path))
    assert message in str(error.value) and "\n" not in str(error.value)


# Numbers of scales: not a number, infinities, the largest, the least, both zeros, one below zero.
HOSTILE_SCALES = (np.nan, np.inf, -np.inf, 3.3e38, 1e-45, 0.0, -0.0, -1.0)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted([*FORMS, "mxfp4"])), st.booleans(), st.data())
def test_damaged_scales_are_refused_or_run(undamaged, tmp_path_factory, form, mixture, data):
    """A part of a quantised matrix, of one expert or of a dense one, is missing, has another shape or dtype, or numbers
    that no one meant.
    """
    folder, given = tmp_path_factory.mktemp("scales"), undamaged(form, mixture)
    shutil.copy(given / "config.json", folder)
    tensors = stored(given / "model.safetensors")
    parts = [name for name, (dtype, *_) in tensors.items() if not name.endswith((".weight", "_bias", "embed_tokens"))]
    for name in data.draw(st.lists(st.sampled_from(sorted(parts)), min_size=1, max_size=2, unique=True)):
        damage(tensors, name, data)
    write_tensors(folder / "model.safetensors", tensors)
    try:
        logits(folder, repack=data.draw(st.sampled_from(["off", "threads"])))
    except UserError as error:
        assert "\n" not in str(error)


def damage(tensors: dict, name: str, data) -> None:
    """One of a tensor's lies."""
    dtype, shape, held = tensors[name]
    size = len(held) // max(int(np.prod(shape)), 1)
    lie = data.draw(st.sampled_from(["missing", "shape", "dtype", "numbers", "bytes"]))
    if lie == "missing":
        del tensors[name]
    elif lie == "shape":
        other = data.draw(st.sampled_from([shape[::-1], (1, *shape), shape[:-1], (*shape[:-1], 0), (), (len(held),)]))
        tensors[name] = (dtype, other, bytes(size * int(np.prod(other))))
    elif lie == "dtype":
        sizes = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I32": 4, "I64": 8, "BOOL": 1}
        other = data.draw(st.sampled_from(sorted(sizes)))
        tensors[name] = (other, shape, (held * 8)[: sizes[other] * (len(held) // size)])
    elif lie == "numbers" and dtype == "BF16":
        changed, number = bytearray(held), np.float32(data.draw(st.sampled_from(HOSTILE_SCALES)))
        for at in data.draw(st.lists(st.integers(0, len(held) // 2 - 1), min_size=1, max_size=3)):
            changed[2 * at : 2 * at + 2] = number.tobytes()[2:]
        tensors[name] = (dtype, shape, bytes(changed))
    else:
        changed = mutated(held, data.draw(changes(len(held)))) if held else bytearray()
        tensors[name] = (dtype, shape, bytes(changed[: len(held)]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(FORMS)),
    st.lists(st.tuples(st.integers(0, 1 << 22), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4),
)
def test_damaged_files_are_refused_or_run(undamaged, tmp_path_factory, form, changes):
    """Half of the changes fall into the header, the rest anywhere."""
    folder, given = tmp_path_factory.mktemp("damaged"), undamaged(form)
    shutil.copy(given / "config.json", folder)
    data = bytearray((given / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for at, new in changes:
        at %= header if at % 2 else len(data)
        data[at : at + len(new)] = new[: len(data) - at]
    (folder / "model.safetensors").write_bytes(data)
    try:
        logits(folder)
    except UserError as error:
        assert "\n" not in str(error)
