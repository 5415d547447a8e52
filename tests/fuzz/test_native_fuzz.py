"""Damaged models opened, loaded and run, and batch messages that lie: an error of ckdist's own or a clean run, never a
crash.

`make test-asan` runs the same under the sanitizers, which see what only happens to go well here.
"""

import functools
import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ckdist import native
from ckdist.comm.world import start_world
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import NativeError, UserError
from ckdist.program.native_worker import COMMANDS
from ckdist.weights.gguf import read_gguf
from tests.support.paths import GOLDEN

TYPES = ("Q2_K", "Q4_K_M", "IQ4_XS", "Q8_0", "F16", "IQ1_M", "IQ2_XS", "IQ3_S", "MXFP4", "TQ1_0")
PATHS = {name: GOLDEN / "gguf" / f"{name}.gguf" for name in TYPES} | {"experts": GOLDEN / "glm4moe" / "q8_0.gguf"}
GGUF = {name: path.read_bytes() for name, path in PATHS.items()}
EXAMPLES = int(os.environ.get("CKDIST_FUZZ_EXAMPLES", "150"))
FUZZ = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


def run_model(path) -> None:
    """Loads the model at `path` and runs a prompt and one token, as commands do."""
    model = load_model(EngineConfig(model=str(path), threads=2, ctx_size=32, parallel=1, ubatch_size=8), start_world())
    try:
        sequence = SingleSequence(model.executable)
        tokens = np.arange(11) % model.spec.vocab_size
        for ids in (tokens, tokens[:1]):
            logits = sequence.feed(ids, outputs="last")
            assert logits.shape == (1, model.spec.vocab_size)
    finally:
        model.close()


def refused_or_clean(path) -> None:
    try:
        run_model(path)
    except UserError as error:
        assert "\n" not in str(error), error


@settings(max_examples=EXAMPLES, **FUZZ)
@given(
    st.sampled_from(sorted(GGUF)),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4),
)
def test_damaged_gguf_is_refused_or_runs(tmp_path, name, changes):
    """Half of the changes fall into the header, the rest anywhere."""
    data = bytearray(GGUF[name])
    header = min(tensor.offset for tensor in _tensors(name))
    for at, new in changes:
        at %= header if at % 2 else len(data)
        data[at : at + len(new)] = new[: len(data) - at]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refused_or_clean(path)


@settings(max_examples=EXAMPLES, **FUZZ)
@given(st.sampled_from(sorted(GGUF)), st.data())
def test_damaged_numbers_of_gguf_are_refused_or_run(tmp_path, name, data):
    """One number of the metadata becomes another, of which the edges are the most likely."""
    content = bytearray(GGUF[name])
    _key, at, kind = data.draw(st.sampled_from(_numbers(name)))
    value = data.draw(
        st.sampled_from(
            [0, 1, 2, 3, 5, 8, 31, 63, 65, 96, 128, 255, 1 << 14, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
        )
        | st.integers(0, (1 << 32) - 1)
    )
    real = st.sampled_from([0.0, -1.0, 1e-38, 1e38, float("inf"), float("nan")])
    content[at : at + 4] = (
        np.array(value, "<u4").tobytes() if kind == "u4" else np.array(data.draw(real), "<f4").tobytes()
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refused_or_clean(path)


@functools.cache
def _tensors(name):
    return tuple(read_gguf(PATHS[name]).tensors.values())


@functools.cache
def _numbers(name) -> list[tuple[str, int, str]]:
    """Key, place of the value and kind of every 32-bit number of the metadata."""
    data, found = GGUF[name], []
    for key in read_gguf(PATHS[name]).metadata:
        end = data.index(len(key).to_bytes(8, "little") + key.encode()) + 8 + len(key)
        kind = int.from_bytes(data[end : end + 4], "little")
        if kind in (4, 5, 6):
            found.append((key, end + 4, "f4" if kind == 6 else "u4"))
    return found


@settings(max_examples=EXAMPLES, **FUZZ)
@given(
    st.sampled_from(["llama3", "gemma3", "qwen3", "mistral", "qwen2moe", "glm4moe", "minimax_m2", "mixtral", "gptoss"]),
    st.data(),
)
def test_damaged_folders_are_refused_or_run(tmp_path, family, data):
    """One field of config.json becomes another number, or a few bytes of the weights change."""
    folder = tmp_path / family
    folder.mkdir(exist_ok=True)
    config = json.loads((GOLDEN / family / "config.json").read_text())
    weights = bytearray((GOLDEN / family / "model.safetensors").read_bytes())
    if data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(config)))
        config[key] = data.draw(
            st.sampled_from([0, 1, 2, 3, 7, 96, 1 << 20, 1 << 40, -1, 1e30, None, "", [], {}, True])
        )
    else:
        for at, new in data.draw(
            st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=3)
        ):
            weights[at : at + len(new)] = new
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    refused_or_clean(folder)


@pytest.fixture(scope="module")
def loaded():
    """A small model: 256 tokens of vocabulary at most, 8 tokens a step, 2 sequences, contexts of 64 in 6 blocks."""
    model = load_model(
        EngineConfig(
            model=str(GOLDEN / "gguf" / "Q8_0.gguf"),
            threads=2,
            ctx_size=48,
            kv_memory=1 << 20,
            parallel=2,
            ubatch_size=8,
        ),
        start_world(),
    )
    yield model
    model.close()


def send(model, message) -> None:
    array = np.array(message, np.int32)
    worker = model.executable.worker
    worker.publish(native.pointer(array, "int32_t *"), len(array))
    worker.run()


def send_step(model, step) -> None:
    send(model, [COMMANDS["run"], model.executable.model, 0, *step])


HOSTILE = st.sampled_from(
    [-(1 << 31), -1, 0, 1, 2, 3, 8, 9, 15, 16, 47, 48, 1 << 16, (1 << 31) - 16, (1 << 31) - 1]
) | st.integers(-(1 << 31), (1 << 31) - 1)


@settings(max_examples=4 * EXAMPLES, **FUZZ)
@given(data=st.data())
def test_messages_that_lie_are_refused(loaded, data):
    """A good message with up to three numbers replaced, or its end cut or grown."""
    tokens = data.draw(st.integers(1, 8))
    position = data.draw(st.integers(0, 48 - tokens))
    blocks, model = -(-(position + tokens) // 16), loaded.executable.model
    message = [
        COMMANDS["run"],
        model,
        0,
        tokens,
        1,
        blocks,
        1,
        0,
        0,
        2,
        0,
        0,
        0,
        0,
        0,
        *range(tokens),
        tokens,
        position,
        blocks,
        *range(blocks),
        tokens - 1,
    ]
    send(loaded, message)
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(message) - 1), HOSTILE), max_size=3)):
        message[at] = value
    message = (
        message[: data.draw(st.integers(0, len(message)))] + data.draw(st.lists(HOSTILE, max_size=4))
        if data.draw(st.booleans())
        else message
    )
    assume(message[:1] != [COMMANDS["unload"]])
    try:
        send(loaded, message)
    except NativeError as error:
        assert "\n" not in str(error)


@settings(max_examples=2 * EXAMPLES, **FUZZ)
@given(st.lists(HOSTILE, max_size=40))
def test_random_messages_are_refused(loaded, message):
    assume(message[:1] != [COMMANDS["unload"]])
    try:
        send(loaded, message)
    except NativeError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "change, words",
    [
        ({0: 9}, "exceeds 8"),
        ({0: 0}, "0 tokens"),
        ({1: 3}, "exceeds 8, 2"),
        ({2: 1 << 30}, "wrong length"),
        ({4: 1}, "wrong length"),
        ({4: -1}, "wrong length"),
        ({5: 1}, "wrong length"),
        ({5: -1}, "wrong length"),
        ({7: 2}, "steps of plan 2 of [12]"),  # 2: one for prompts
        ({7: -1}, "plan -1"),
        ({8: 1 << 20}, "asks for 1048576 steps"),
        ({8: -1}, "asks for -1 steps"),
        ({9: 1}, "1 embeddings exceeds 8, 2, 8, 0"),
        ({9: -1}, "-1 embeddings exceeds"),
        ({10: 1}, "wrong length"),
        ({10: 2}, "wrong length"),
        ({10: -1}, "wrong length"),
        ({11: 1}, "wrong length"),
        ({11: -1}, "wrong length"),
        ({12: 1 << 20}, "outside the vocabulary"),
        ({12: -1}, "outside the vocabulary"),
        ({15: 48}, "in a context of 48"),
        ({15: -1}, "in a context of 48"),
        ({16: 0}, "has 0 blocks"),
        ({17: 1 << 20}, "outside the cache"),
        ({17: -1}, "outside the cache"),
        ({18: 2}, "output 2 is outside the batch of 2"),
    ],
)
def test_every_lie_has_its_words(loaded, change, words):
    message = [2, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 5, 6, 2, 0, 1, 0, 1]
    send_step(loaded, message)
    for at, value in change.items():
        message[at] = value
    with pytest.raises(NativeError, match=words):
        send_step(loaded, message)


@pytest.mark.parametrize("slot", [-1, 0])
def test_a_model_without_slots_has_no_adapters(loaded, slot):
    with pytest.raises(NativeError, match="the model has no slots for adapters"):
        send_step(loaded, [2, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 1, 5, 6, 2, 0, 1, 0, 1, slot, 0, 0])


def test_an_adapter_has_a_slot_and_a_finite_scale():
    config = EngineConfig(model=str(GOLDEN / "llama3"), threads=1, ctx_size=48, parallel=1, ubatch_size=8, max_loras=1)
    model = load_model(config, start_world())
    step = lambda slot, scale: [2, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 1, 5, 6, 2, 0, 1, 0, 1, slot, 0, scale]
    send_step(model, step(0, 0x3FF << 20))
    for slot, scale in ((1, 0), (-2, 0), (0, 0x7FF << 20), (0, 0x7FF8 << 16)):
        with pytest.raises(NativeError, match=f"a sequence has adapter {slot} of 1, and its scale is"):
            send_step(model, step(slot, scale))
    two = [2, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 2, 5, 6, 2, 0, 1, 0, 1, *(0, 0, 0x3FF << 20) * 2]
    with pytest.raises(NativeError, match="a sequence has 2 adapters, and the model 1 slots"):
        send_step(model, two)
    model.close()


@pytest.mark.parametrize("first", [-1, 17, 1 << 30])
def test_the_first_of_two_texts_fits_its_blocks(loaded, first):
    message = [2, 1, 1, 1, 0, 1, 2, 0, 0, 0, 0, 0, 5, 6, 2, 0, 1, 0]
    send_step(loaded, [*message, 1, 1])
    with pytest.raises(NativeError, match=f"first text of a sequence has {first} tokens, and its 1 blocks hold 16"):
        send_step(loaded, [*message, first, 1])


def test_positions_of_three_axes_lie_in_the_context(loaded):
    """`loaded` has one axis, and Qwen 3.5 has three."""
    step = lambda *positions: [2, 1, 1, 1, 0, 0, 2, 0, 0, 0, 2, 0, 5, 6, 2, 0, 1, 0, 1, *positions]
    with pytest.raises(NativeError, match="the positions of the model have one"):
        send_step(loaded, step(0, 0, 0, 1, 1, 1))
    config = EngineConfig(model=str(GOLDEN / "qwen35"), threads=1, ctx_size=48, parallel=1, ubatch_size=8)
    model = load_model(config, start_world())
    slots = [-1, 0, -1, 0]
    own = lambda *positions: [2, 1, 1, 1, 1, 0, 2, 0, 0, 0, 2, 0, 5, 6, 2, 0, 1, 0, *slots, 1, *positions]
    send_step(model, own(0, 47, 0, 1, 1, 47))
    for wrong in (-1, 48, 1 << 30):
        with pytest.raises(NativeError, match=f"position {wrong} is outside the context of 48"):
            send_step(model, own(0, 0, 0, 1, 1, wrong))
    with pytest.raises(NativeError, match="wrong length"):
        send_step(model, own(0, 0, 0, 1, 1))
    model.close()


@pytest.mark.parametrize("outputs", [[1, 0], [0, 0]])
def test_outputs_ascend(loaded, outputs):
    message = [2, 1, 1, 2, 0, 0, 2, 0, 0, 0, 0, 0, 5, 6, 2, 0, 1, 0]
    send_step(loaded, [*message, 0, 1])
    with pytest.raises(NativeError, match=f"output {outputs[1]} comes after output {outputs[0]}; they must ascend"):
        send_step(loaded, [*message, *outputs])


COPY_INTS = native.ffi.sizeof("struct ckdist_block_copy") // 4


@pytest.mark.parametrize(
    "message, words",
    [
        ([COMMANDS["run"], 0], "2 ints has no header"),
        ([9, 0, 0], "unknown kind 9"),
        ([-1, 0, 0], "unknown kind -1"),
        ([COMMANDS["report"], 0, 0, 0], "has 4 ints, not 3"),
        ([COMMANDS["run"], 1, 0, 2, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 5, 6, 2, 0, 1, 0, 1], "model 1 is not loaded"),
        ([COMMANDS["run"], 0, 1, 2, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 5, 6, 2, 0, 1, 0, 1], "waits for copy 1 of 0"),
        ([COMMANDS["copy_results"], 0, 0, 0], "has 4 ints, not 3"),
        ([COMMANDS["copy_blocks"], 0, 0, 0, 1], "do not fit its blocks"),
        ([COMMANDS["copy_blocks"], 0, 0, 0, -1], "do not fit its blocks"),
        ([COMMANDS["copy_blocks"], 0, 0, 0, 65, *[0] * COPY_INTS * 65], "more than 64 blocks"),
        ([COMMANDS["copy_blocks"], 0, 0, 0, 1, *[0] * COPY_INTS], "names slab 0, which the model does not have"),
        ([COMMANDS["copy_blocks"], 0, 0, 0, 1, *[0] * (COPY_INTS - 3), 7, 0, 0], "names slab 7"),
    ],
)
def test_every_lie_of_a_command_has_its_words(loaded, message, words):
    with pytest.raises(NativeError, match=words):
        send(loaded, message)
