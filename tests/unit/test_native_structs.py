"""`native.struct` and `native.call`: Python values by the C types of fields and parameters."""

import gc
import re
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from ckdist import native
from ckdist.errors import CkdistError, NativeError
from tests.support.paths import ROOT


@dataclass
class Part:
    first: int
    count: int


def test_a_struct_keeps_alive_all_that_it_points_to() -> None:
    starts = np.array([3, 5], np.int32)
    batch = native.struct("ckdist_training_batch", token_ids=[7, 8, 9], starts=starts, tokens=3)
    plan = native.struct("ckdist_execution_plan", lists=[], vectors=[starts.ctypes.data], host_rows="alike")
    step = native.struct("ckdist_tally_step", step={"kind": 4, "rows": "host"}, out=1)
    lists = native.struct("ckdist_step_list", steps=[step], count=1)
    del starts, step
    gc.collect()
    junk = [np.full(2, 99, np.int32) for _ in range(100)]
    assert [batch.token_ids[i] for i in range(3)] == [7, 8, 9] and [batch.starts[0], batch.starts[1]] == [3, 5]
    assert batch.targets == native.ffi.NULL and batch.sequences == 0 and len(junk) == 100
    assert plan.host_rows == native.lib.ckdist_host_rows_alike
    assert (lists.steps[0].kind, lists.steps[0].rows) == (4, native.lib.ckdist_rows_host)


def test_nested_structs_are_dicts_dataclasses_or_lists() -> None:
    linear = native.struct(
        "ckdist_linear_step",
        step={"kind": 2},
        products=[{"x": Part(1, 2), "weight": [3, 4], "out": 5}, {"out": 6}],
        count=2,
    )
    first = linear.products[0]
    assert [first.x.first, first.x.count, first.weight.first, first.weight.count, first.out] == [1, 2, 3, 4, 5]
    assert linear.products[1].out == 6 and linear.step.kind == 2
    shape = native.struct("ckdist_attention_task", cache=[1, 8, 32, 64, True])
    assert (shape.cache.value_type, shape.cache.latent) == (8, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"file": 1, "fil": 2}, "struct ckdist_vector_plan has no field 'fil'; it has name, file, source_type"),
        ({"name": np.zeros(3, np.float32)}, "char * needs an array of int8, not of float32"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(NativeError, match=re.escape(message)):
        native.struct("ckdist_vector_plan", **fields)


def test_an_array_must_have_the_item_type_of_the_field() -> None:
    with pytest.raises(NativeError, match=re.escape("int32_t * needs an array of int32, not of int64")):
        native.struct("ckdist_training_batch", token_ids=np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="contiguous"):
        native.struct("ckdist_training_batch", token_ids=np.zeros(6, np.int32)[::2])
    with pytest.raises(NativeError, match="has no 'everywhere'; it has tokens, selected, local_selected, host"):
        native.struct("ckdist_tally_step", step={"kind": 0, "rows": "everywhere"})


def test_a_call_returns_its_output_and_frees_what_it_made() -> None:
    pool = native.new(native.lib.ckdist_pool_new, 2, None, None, 10)
    assert native.ffi.typeof(pool).item.cname == "struct ckdist_pool"
    assert native.call(native.lib.ckdist_barrier_seconds, 1, [0], [0], 10) >= 0
    assert native.call(native.lib.ckdist_tile_bytes, None, 0, 16) == 16 * 16 * 4
    native.ffi.release(pool)
    with pytest.raises(CkdistError):
        native.new(native.lib.ckdist_pool_new, 0, None, None, 10)


def test_a_pointer_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="ckdist_trace"):
        native.struct("ckdist_filling", trace=native.struct("ckdist_value"))
    with pytest.raises(TypeError, match="ckdist_trace"):
        native.struct("ckdist_filling", trace=native.new(native.lib.ckdist_pool_new, 1, None, None, 10))


def test_a_closed_object_is_an_error_of_one_line() -> None:
    with pytest.raises(NativeError, match="this ckdist_communicator is closed"):
        native.call(native.lib.ckdist_communicator_allocate, None, 8)


FIRST_USES = """
import gc, threading, time
from ckdist import native
gc.callbacks.append(lambda *_: time.sleep(1e-5))  # another thread runs inside an allocation
gc.set_threshold(1, 1, 1)
start = threading.Barrier(4)
def use():
    start.wait()
    for name in ("step_list", "layer", "program", "execution_plan", "linear_step", "experts_step", "matrix_plan"):
        native.ffi.typeof(f"struct ckdist_{name}").fields
threads = [threading.Thread(target=use) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_threads_may_use_a_struct_at_once_for_the_first_time() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USES], cwd=ROOT, check=True, timeout=60)
