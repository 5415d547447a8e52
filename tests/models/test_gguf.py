"""The GGUF header reader against the gguf package, on lies of every kind, and on mutated bytes."""

import os
import struct
import time

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckdist.errors import ArchitectureError, ModelFileError
from ckdist.weights import gguf as reader
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.gguf import read_gguf
from tests.support.mutations import changes, mutated
from tests.support.paths import GOLDEN as GOLDEN_FILES

GOLDEN = GOLDEN_FILES / "gguf"


def string(text) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def scalar(key, kind, fmt, value) -> bytes:
    return string(key) + struct.pack("<I" + fmt, kind, value)


def strings(key, values) -> bytes:
    return string(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(string, values))


def info(name="w", dims=(32, 2), kind=0, offset=0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(keys=(), infos=(), data=256, version=3, magic=b"GGUF", key_count=None, tensor_count=None) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(infos) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head += b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


VALID = file_of(
    [scalar("general.alignment", 4, "I", 32), strings("tokens", ["a", "é", ""]), scalar("x", 12, "d", 1.5)], [info()]
)


def test_valid_file_of_both_versions(tmp_path):
    for version in (2, 3):
        (tmp_path / "m.gguf").write_bytes(
            file_of([strings("tokens", ["a", "é", ""]), scalar("b", 7, "?", True)], [info()], version=version)
        )
        model = read_gguf(tmp_path / "m.gguf")
        assert model.metadata == {"tokens": ["a", "é", ""], "b": True}
        tensor = model.tensors["w"]
        assert (tensor.dtype, tensor.shape, tensor.nbytes, tensor.offset % 32) == ("F32", (2, 32), 256, 0)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda p: p.stem)
def test_golden_files_read_as_the_gguf_package_reads_them(path):
    model, expected = read_gguf(path), gguf.GGUFReader(path)
    for key, value in model.metadata.items():
        other = expected.fields[key].contents()
        assert value.tolist() == other if isinstance(value, np.ndarray) else value == other
    assert set(model.metadata) == {key for key in expected.fields if not key.startswith("GGUF.")}
    for tensor in expected.tensors:
        mine = model.tensors[tensor.name]
        assert (mine.shape[::-1], mine.offset, mine.nbytes, mine.dtype) == (
            tuple(tensor.shape.tolist()),
            tensor.data_offset,
            tensor.n_bytes,
            tensor.tensor_type.name,
        )


def nested(depth) -> bytes:
    return string("deep") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)


LIES = {
    "magic": (file_of(magic=b"GGML"), "not a GGUF file: it begins with b'GGML'"),
    "empty": (b"", "ends at byte 4, but the file has 0"),
    "version": (file_of(version=1), "version 1 is not known; the known ones are 2 and 3"),
    "big-endian": (file_of(version=3 << 24), "big-endian"),
    "tensor count": (file_of(tensor_count=1 << 63), f"number of tensors is {1 << 63}, more than the 65536"),
    "key count": (file_of(key_count=1 << 40), f"metadata keys is {1 << 40}, more than the 65536"),
    "keys missing": (file_of(key_count=9, data=0), "truncated"),
    "key length": (file_of([struct.pack("<Q", 1 << 62)]), f"key 0 is {1 << 62}, more than the 1024"),
    "string length": (
        file_of([string("k") + struct.pack("<IQ", 8, 1 << 62)]),
        f"'k' is {1 << 62}, more than the 16777216",
    ),
    "string past the end": (file_of([string("k") + struct.pack("<IQ", 8, 5000)]), "but the file has"),
    "string in array": (
        file_of([string("k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 50)]),
        f"string 0 of 'k' is {1 << 50}",
    ),
    "not UTF-8": (file_of([strings("k", [b"ok", b"a\xffb"])]), "string 1 of 'k' is not UTF-8: byte 1 of 3 is 0xff"),
    "key not UTF-8": (file_of([scalar(b"\xff", 0, "B", 1)]), "metadata key 0 is not UTF-8"),
    "duplicate key": (file_of([scalar("k", 0, "B", 1)] * 2), "'k', stands there twice"),
    "value type": (file_of([scalar("k", 13, "B", 1)]), "'k' has value type 13; the known ones are 0 to 12"),
    "element type": (file_of([string("k") + struct.pack("<IIQ", 9, 77, 1)]), "value type 77"),
    "array length": (file_of([string("k") + struct.pack("<IIQ", 9, 4, 1 << 60)]), f"length of 'k' is {1 << 60}"),
    "array past the end": (
        file_of([string("k") + struct.pack("<IIQ", 9, 4, 1 << 20)]),
        "has 1048576 elements of at least 4 bytes, but only",
    ),
    "nesting": (file_of([nested(9)]), "nested 4 deep, more than the 3"),
    "alignment": (
        file_of([scalar("general.alignment", 4, "I", 48)]),
        "general.alignment is 48; it must be a power of two",
    ),
    "alignment zero": (file_of([scalar("general.alignment", 4, "I", 0)]), "general.alignment is 0"),
    "alignment type": (
        file_of([string("general.alignment") + struct.pack("<I", 8) + string("32")]),
        "general.alignment is '32'",
    ),
    "no dimensions": (file_of(infos=[info(dims=())]), "has 0 dimensions; it must have 1 to 4"),
    "dimensions": (file_of(infos=[info(dims=(1,) * 5)]), "has 5 dimensions"),
    "zero dimension": (file_of(infos=[info(dims=(32, 0))]), "dimension 1 of tensor 'w' is 0"),
    "dimension": (file_of(infos=[info(dims=(1 << 63, 2))]), f"dimension 0 of tensor 'w' is {1 << 63}"),
    "product": (file_of(infos=[info(dims=(1 << 40,) * 4)]), f"ends at byte {4 * (1 << 160) + 96}, but the file has"),
    "offset": (file_of(infos=[info(offset=1 << 63)]), f"ends at byte {(1 << 63) + 352}, but the file has 352"),
    "offset by one": (file_of(infos=[info()], data=255), "ends at byte 352, but the file has 351"),
    "unaligned": (file_of(infos=[info(offset=8)]), "offset 8, which is not a multiple of the alignment 32"),
    "duplicate tensor": (file_of(infos=[info(), info()]), "'w', stands there twice"),
    "row of blocks": (
        file_of(infos=[info(dims=(48,), kind=8)]),
        "rows of 48 elements, which Q8_0 blocks of 32 do not divide",
    ),
    "known other type": (
        file_of(infos=[info(kind=40)]),
        r"type 40 \(NVFP4\); the known types are F32, F16, Q4_0",
    ),
    "unknown type": (file_of(infos=[info(kind=99)]), r"type 99 \(unknown\); the known"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_one_line_that_names_file_and_numbers(tmp_path, lie):
    data, message = LIES[lie]
    path = tmp_path / "lie.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=message) as e:
        read_gguf(path)
    assert str(e.value).startswith(str(path)) and "\n" not in str(e.value)


def test_header_larger_than_the_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 64)
    (tmp_path / "m.gguf").write_bytes(VALID)
    with pytest.raises(ModelFileError, match="past the 64 bytes that a header may have"):
        read_gguf(tmp_path / "m.gguf")


def test_more_strings_than_the_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_OBJECTS", 5)
    (tmp_path / "m.gguf").write_bytes(file_of([strings("a", "xyz"), strings("b", "xyz")]))
    with pytest.raises(ModelFileError, match="arrays up to 'b' have 6 strings, more than the 5 allowed"):
        read_gguf(tmp_path / "m.gguf")


def test_every_truncation_of_a_valid_file(tmp_path):
    path = tmp_path / "m.gguf"
    for size in range(len(VALID)):
        path.write_bytes(VALID[:size])
        with pytest.raises(ModelFileError, match=f"has {size} bytes|only {size} bytes|but only .* bytes follow"):
            read_gguf(path)


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes(600), st.integers(0, 600))
def test_mutated_bytes_parse_or_are_refused(tmp_path, places, cut):
    data = mutated(VALID, places)
    path = tmp_path / "m.gguf"
    path.write_bytes(data[: len(data) - cut % 40])
    try:
        read_gguf(path)
    except ModelFileError as e:
        assert "\n" not in str(e)


@settings(max_examples=150, deadline=4000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes(13279, most=3))
def test_mutated_model_opens_or_is_refused(tmp_path, places):
    path = tmp_path / "m.gguf"
    path.write_bytes(mutated((GOLDEN / "Q4_K_M.gguf").read_bytes(), places))
    try:
        open_checkpoint(path)
    except (ModelFileError, ArchitectureError) as e:
        assert "\n" not in str(e)


def test_large_vocabulary_is_read_fast(tmp_path):
    tokens = strings("tokens", [f"token{i}é" for i in range(150_000)])
    merges = strings("merges", [f"ab{i} cd{i}" for i in range(280_000)])
    scores = string("scores") + struct.pack("<IIQ", 9, 6, 150_000) + bytes(600_000)
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of([tokens, merges, scores]))
    seconds = []
    for _ in range(3):
        began = time.process_time()
        model = read_gguf(path)
        seconds.append(time.process_time() - began)
    assert model.metadata["tokens"][-1] == "token149999é" and model.metadata["merges"][279_999] == "ab279999 cd279999"
    assert model.metadata["scores"].shape == (150_000,)
    assert min(seconds) < 0.6, seconds  # 0.15 s on an idle core


def split_parts(
    folder, count=3, total=None, number=None, name="model-{:05}-of-{:05}.gguf", tensors=lambda i: [f"w{i}"]
):
    for i in range(count):
        keys = [scalar("split.no", 2, "H", i if number is None else number), scalar("split.count", 2, "H", count)]
        keys += [scalar("split.tensors.count", 5, "i", count if total is None else total), scalar("part", 0, "B", i)]
        (folder / name.format(i + 1, count)).write_bytes(file_of(keys, [info(n) for n in tensors(i)]))
    return [folder / name.format(i + 1, count) for i in range(count)]


def test_any_part_of_a_split_model_finds_the_rest(tmp_path):
    parts = split_parts(tmp_path)
    for part in parts:
        model = read_gguf(part)
        assert model.metadata["part"] == 0 and model.files == tuple(parts)
        assert {n: t.file for n, t in model.tensors.items()} == {f"w{i}": p for i, p in enumerate(parts)}


def test_splits_that_lie(tmp_path):
    parts = split_parts(tmp_path, total=7)
    with pytest.raises(ModelFileError, match="have 7 tensors, but they have 3"):
        read_gguf(parts[0])
    parts = split_parts(tmp_path, tensors=lambda i: ["w"])
    with pytest.raises(
        ModelFileError, match=r"00002-of-00003.gguf has a tensor 'w' that model-00001-of-00003.gguf has too"
    ):
        read_gguf(parts[0])
    parts = split_parts(tmp_path, number=1)
    with pytest.raises(ModelFileError, match="says that it is part 1 of 3, but stands where part 0 of 3 belongs"):
        read_gguf(parts[2])
    parts = split_parts(tmp_path)
    parts[1].unlink()
    with pytest.raises(
        ModelFileError, match=r"model-00002-of-00003.gguf is missing: model-00003-of-00003.gguf is one of 3"
    ):
        read_gguf(parts[2])
    with pytest.raises(ModelFileError, match="named as one of 4 parts, but says that there are 3"):
        read_gguf(parts[0].rename(tmp_path / "model-00001-of-00004.gguf"))
    with pytest.raises(ModelFileError, match=r"one of 3 parts, but its name does not end in -00001-of-00003.gguf"):
        read_gguf(parts[2].rename(tmp_path / "other.gguf"))


def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(ModelFileError, match=r"nothing.gguf cannot be opened: No such file"):
        open_checkpoint(tmp_path / "nothing.gguf")
    with pytest.raises(ModelFileError, match=r"no config.json; give a folder with one, or a GGUF file"):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="pipe is neither a file nor a folder"):
        open_checkpoint(tmp_path / "pipe")
    (tmp_path / "m.safetensors").write_bytes(b"12345678{}")
    with pytest.raises(ModelFileError, match=r"not a GGUF file: it begins with b'1234'.*give the folder"):
        open_checkpoint(tmp_path / "m.safetensors")
