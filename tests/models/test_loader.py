"""Shards against the numpy definition of the same tensors: every type, cut, order and conversion; and what must be
refused.
"""

import gguf
import numpy as np
import pytest

from ckdist.errors import CapacityError, ConfigError, LayoutError, ModelFileError
from ckdist.native import check, ffi, lib, pointer
from ckdist.weights import dtypes
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import dequantize, read_tensor
from ckdist.weights.loader import ShardLoader
from ckdist.weights.tensor_source import TensorSource
from tests.support.checkpoints import WEIGHT, checkpoint_of
from tests.support.paths import GOLDEN as GOLDEN_FILES
from tests.support.products import OWN, random_own

GOLDEN = GOLDEN_FILES / "gguf"


def unpacked(handle) -> np.ndarray:
    """float32 (rows, cols) of a loaded matrix."""
    m = ffi.cast("struct ckdist_matrix *", handle.address)
    assert (m.type, m.rows, m.cols) == (handle.type, handle.rows, handle.cols)
    out = np.full((m.rows, m.cols), np.nan, np.float32)
    check(lib.ckdist_unpack(ffi.NULL, m.type, m.rows, m.cols, m.tiles, handle.bytes, pointer(out, "float *")))
    return out


def random_rows(tensor_type, rows, cols, seed=0) -> np.ndarray:
    """uint8 (rows, bytes) of finite values."""
    rng = np.random.default_rng(seed)
    if tensor_type in dtypes.FLOATS:
        x = rng.standard_normal((rows, cols), np.float32)
        if tensor_type is dtypes.BF16:
            return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return (x if tensor_type is dtypes.F32 else x.astype(np.float16)).view(np.uint8)
    if tensor_type.name in OWN:
        return random_own(tensor_type.name, rows, cols // tensor_type.block_elements, rng).reshape(rows, -1)
    data = rng.integers(0, 256, (rows, tensor_type.row_bytes(cols)), dtype=np.uint8)
    blocks = data.reshape(-1, tensor_type.block_bytes)
    at = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
    }
    at |= {"TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": ()}
    for offset in at.get(tensor_type.name, (0,)):  # half-precision scales
        blocks[:, offset : offset + 2] = rng.uniform(0.01, 1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    if tensor_type.name == "IQ1_M":
        blocks[:, 55] = blocks[:, 55] & 0x0F | 0x30  # the top of its scale, which stands in four parts
    if tensor_type.name == "MXFP4":
        blocks[:, 0] = rng.integers(120, 128, len(blocks))
    return data


def write(path, data: np.ndarray, tensor_type, cols, lead=48, **more) -> TensorSource:
    path.write_bytes(b"\xff" * lead + data.tobytes())
    return TensorSource(WEIGHT, tensor_type.number, (len(data), cols), path, lead, **more)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda p: p.stem)
def test_whole_model_loads_as_the_gguf_package_reads_it(path):
    checkpoint = open_checkpoint(path)
    loader = ShardLoader(checkpoint, threads=2)
    handles = {
        name: loader.add_matrix(name, [(0, source.shape[0])]) if len(source.shape) == 2 else loader.add_vector(name)
        for name, source in checkpoint.tensors.items()
    }
    total = loader.load(progress=False)
    sizes = {source.offset: source.nbytes for source in checkpoint.tensors.values()}  # tied weights count once
    assert total == sum(sizes.values())
    stored = {(t.data_offset): t for t in gguf.GGUFReader(path).tensors}
    for name, source in checkpoint.tensors.items():
        tensor = stored[source.offset]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(source.shape)
        np.testing.assert_array_equal(read_tensor(source), expected)
        got = unpacked(handles[name]) if len(source.shape) == 2 else handles[name].numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("tensor_type", dtypes.KNOWN, ids=lambda t: t.name)
def test_cuts_of_rows_and_columns(tmp_path, tensor_type):
    block = max(lib.ckdist_type_undivided_columns(tensor_type.number), 32)
    rows, cols = 45, 4 * block
    data = random_rows(tensor_type, rows, cols)
    whole = dequantize(data, tensor_type.number, cols)
    checkpoint = checkpoint_of(tmp_path, write(tmp_path / "w", data, tensor_type, cols))
    loader = ShardLoader(checkpoint, threads=2)
    cuts = [
        ([(0, 45)], None),
        ([(3, 20)], (block, 3 * block)),
        ([(40, 45), (0, 13), (20, 21)], (0, 2 * block)),
        ([(1, 1)], None),
        ([(0, 9)], (0, 0)),
    ]
    handles = [loader.add_matrix(WEIGHT, *cut) for cut in cuts]
    loader.load(progress=False)
    for handle, (ranges, columns) in zip(handles, cuts, strict=True):
        expected = np.concatenate([whole[b:e] for b, e in ranges])[:, slice(*(columns or (0, cols)))]
        assert (handle.rows, handle.cols) == expected.shape
        if expected.size:
            np.testing.assert_allclose(unpacked(handle), expected, rtol=1e-6, atol=1e-6)
        else:
            assert handle.bytes == 0


def test_narrow_column_cut_of_wide_rows_skips_the_rest(tmp_path):
    data = random_rows(dtypes.F32, 50, 8192)
    loader = ShardLoader(checkpoint_of(tmp_path, write(tmp_path / "w", data, dtypes.F32, 8192)), threads=1)
    handle = loader.add_matrix(WEIGHT, [(5, 50)], (1024, 1280))
    assert loader.load(progress=False) == 45 * 256 * 4
    np.testing.assert_array_equal(unpacked(handle), data.view(np.float32)[5:, 1024:1280])


def test_interleaved_rows_come_back_in_halves(tmp_path):
    heads, head_rows, cols = 6, 8, 32
    x = np.random.default_rng(1).standard_normal((heads * head_rows, cols), np.float32)
    stored = x.reshape(heads, 2, head_rows // 2, cols).swapaxes(1, 2).reshape(x.shape)  # as the GGUF converter permutes
    source = write(tmp_path / "w", stored.view(np.uint8), dtypes.F32, cols, head_rows=head_rows)
    np.testing.assert_array_equal(read_tensor(source), x)
    bias = TensorSource("b", 0, (heads * head_rows,), tmp_path / "b", 0, head_rows=head_rows)
    (tmp_path / "b").write_bytes(np.ascontiguousarray(stored[:, 0]).tobytes())
    loader = ShardLoader(checkpoint_of(tmp_path, source, bias), threads=2)
    cuts = [[(0, 48)], [(16, 40)], [(3, 21)], [(40, 48), (0, 8)]]
    handles = [loader.add_matrix(WEIGHT, cut) for cut in cuts]
    vector = loader.add_vector("b", 8, 24)
    loader.load(progress=False)
    for cut, handle in zip(cuts, handles, strict=True):
        np.testing.assert_array_equal(unpacked(handle), np.concatenate([x[b:e] for b, e in cut]))
    np.testing.assert_array_equal(vector.numpy(), x[8:24, 0])


@pytest.mark.parametrize("tensor_type", dtypes.FLOATS, ids=lambda t: t.name)
@pytest.mark.parametrize("quantize", ["q8_0", "q4_k"])
def test_quantising_while_loading(tmp_path, tensor_type, quantize):
    data = random_rows(tensor_type, 37, 768)
    whole = dequantize(data, tensor_type.number, 768)
    loader = ShardLoader(checkpoint_of(tmp_path, write(tmp_path / "w", data, tensor_type, 768)), 2, quantize)
    handle = loader.add_matrix(WEIGHT, [(2, 37)], (256, 768))
    loader.load(progress=False)
    number = {"q8_0": 8, "q4_k": 12}[quantize]
    assert handle.type == loader.type_of(WEIGHT) == number
    part = np.ascontiguousarray(whole[2:, 256:])
    error = np.sqrt(np.mean((unpacked(handle) - part) ** 2) / np.mean(part**2))
    assert error < {"q8_0": 0.006, "q4_k": 0.09}[quantize]
    stored = np.empty((35, dtypes.BY_NUMBER[number].row_bytes(512)), np.uint8)
    check(
        lib.ckdist_quantize(
            ffi.NULL, number, 35, 512, pointer(part, "float *"), pointer(stored, "uint8_t *"), stored.size
        )
    )
    np.testing.assert_allclose(unpacked(handle), dequantize(stored, number, 512), rtol=1e-6, atol=1e-6)


def test_quantised_types_fall_back_by_shape_and_role(tmp_path):
    sources = [
        TensorSource("model.embed_tokens.weight", 30, (8, 512), tmp_path / "w", 0),
        TensorSource("a", 30, (8, 96), tmp_path / "w", 0),
        TensorSource("b", 30, (8, 40), tmp_path / "w", 0),
        TensorSource("c", 30, (8, 512), tmp_path / "w", 0),
        TensorSource("d", 2, (8, 512), tmp_path / "w", 0),
    ]
    (tmp_path / "w").write_bytes(bytes(16384))
    loader = ShardLoader(checkpoint_of(tmp_path, *sources), 1, "q4_k")
    assert [loader.type_of(s.name) for s in sources] == [8, 8, 30, 12, 2]
    with pytest.raises(ConfigError, match=r"q5_k.*q8_0, q4_k"):
        ShardLoader(checkpoint_of(tmp_path, *sources), 1, "q5_k")


def test_vectors_become_float32_and_norms_gain_one(tmp_path):
    x = np.linspace(-2, 2, 64, dtype=np.float32)
    (tmp_path / "v").write_bytes(x.astype(np.float16).tobytes())
    source = TensorSource("norm", 1, (64,), tmp_path / "v", 0, plus_one=True)
    loader = ShardLoader(checkpoint_of(tmp_path, source), 1)
    part = loader.add_vector("norm", 10, 30)
    loader.load(progress=False)
    expected = x.astype(np.float16).astype(np.float32) + 1
    np.testing.assert_array_equal(part.numpy(), expected[10:30])
    np.testing.assert_array_equal(read_tensor(source), expected)


def test_same_part_is_held_once(tmp_path):
    source = write(tmp_path / "w", random_rows(dtypes.F32, 32, 32), dtypes.F32, 32)
    checkpoint = checkpoint_of(tmp_path, source)
    checkpoint.tensors["lm_head.weight"] = source  # as tied embeddings are
    loader = ShardLoader(checkpoint, 1)
    assert loader.add_matrix(WEIGHT, [(0, 16)]) is loader.add_matrix("lm_head.weight", [(0, 16)])
    assert loader.add_matrix(WEIGHT, [(16, 32)]) is not loader.add_matrix(WEIGHT, [(0, 16)])


def test_bad_plans_and_values_are_refused(tmp_path):
    data = random_rows(dtypes.Q4_K, 20, 512)
    path = tmp_path / "w"
    checkpoint = checkpoint_of(tmp_path, write(path, data, dtypes.Q4_K, 512))
    with pytest.raises(LayoutError, match=r"columns \[0, 128\).*multiples of 256"):
        ShardLoader(checkpoint, 1).add_matrix(WEIGHT, [(0, 20)], (0, 128))

    loader = ShardLoader(checkpoint, 2)
    loader.add_matrix(WEIGHT, [(0, 20)])
    path.write_bytes(path.read_bytes()[:1000])  # while it is open
    with pytest.raises(ModelFileError, match=r"ends at byte 1000 of the 5808 .*changed while"):
        loader.load(progress=False)
    with pytest.raises(ModelFileError, match="truncated or damaged"):
        ShardLoader(checkpoint, 1).add_matrix(WEIGHT, [(0, 20)])
    with pytest.raises(ModelFileError, match="has 952 of its 5760 bytes"):
        read_tensor(checkpoint.tensors[WEIGHT])

    x = np.ones((16, 256), np.float32)
    x[3, 7] = np.inf
    loader = ShardLoader(checkpoint_of(tmp_path, write(path, x.view(np.uint8), dtypes.F32, 256)), 1, "q8_0")
    loader.add_matrix(WEIGHT, [(0, 16)])
    with pytest.raises(ModelFileError, match="stored row 3 that is not finite"):
        loader.load(progress=False)

    path.unlink()
    with pytest.raises(ModelFileError, match="cannot be opened: No such file"):
        ShardLoader(checkpoint, 1)


def test_more_than_the_memory_names_both_numbers(tmp_path):
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(1 << 42)
    rows = (1 << 42) // 4096
    loader = ShardLoader(checkpoint_of(tmp_path, TensorSource(WEIGHT, 0, (rows, 1024), path, 0)), 1)
    loader.add_matrix(WEIGHT, [(0, rows)])
    with pytest.raises(CapacityError, match=r"the weights need 4398\.\d\d GB of memory, and [\d.]+ GB are available"):
        loader.load(progress=False)


def test_native_types_are_the_same():
    for number in range(64):
        known = dtypes.BY_NUMBER.get(number)
        sizes = (lib.ckdist_type_block_elements(number), lib.ckdist_type_block_bytes(number))
        assert sizes == ((known.block_elements, known.block_bytes) if known else (0, 0))
        assert known is None or ffi.string(lib.ckdist_type_name(number)).decode() == known.name
