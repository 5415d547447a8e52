"""A rank program: `replay.py FAMILY...`, the native replay of small random models against the numpy interpreter, over
every transport.
"""

import sys

import numpy as np

from ckdist import native
from ckdist.comm.communicator import open_communicator
from ckdist.comm.world import start_world
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.single import SingleSequence
from ckdist.layouts.phase_layouts import can_dispatch, layouts_for
from ckdist.models.decoder import forward
from ckdist.models.spec import ModelSpec
from ckdist.program.executable import CacheConfig, Executable
from ckdist.program.execution_plan import ExecutionPlan
from ckdist.program.lower import ServingLowering, stored_dims
from ckdist.program.native_worker import NativeWorker
from ckdist.program.tracer import trace
from tests.support.interpreter import Interpreter
from tests.support.specs import FAMILIES, LINEAR, PIECES, spec, weights_of
from tests.support.steps import ARENA_BYTES

lib, ffi = native.lib, native.ffi
F32 = 0


def packed(array: np.ndarray):
    """A native matrix of a float32 (rows, cols) array, or of a stack of them, and what must stay alive with it."""
    if array.ndim == 3:
        missing = -array.shape[1] % 16 if len(array) > 1 else 0  # each matrix begins with a tile of its own
        array = np.pad(array, [(0, 0), (0, missing), (0, 0)])
        array = array.reshape(array.shape[0] * array.shape[1], array.shape[2])
    rows, cols = array.shape
    tile_bytes = lib.ckdist_tile_bytes(ffi.NULL, F32, cols)
    size = (rows + 15) // 16 * tile_bytes
    room = np.zeros(size + 64, np.uint8)
    tiles = room[-room.ctypes.data % 64 :][:size]
    native.check(
        lib.ckdist_pack(
            ffi.NULL,
            F32,
            rows,
            cols,
            native.pointer(array, "uint8_t *"),
            array.nbytes,
            native.pointer(tiles, "uint8_t *"),
            size,
        )
    )
    return ffi.new("struct ckdist_matrix *", [F32, rows, cols, tile_bytes, native.pointer(tiles, "uint8_t *")]), room


def part_of(weight: np.ndarray, key) -> np.ndarray:
    """A part of a matrix, or of each matrix of a stack."""
    matrices = weight[slice(*key.matrices)] if key.matrices else weight
    return matrices[..., slice(*key.rows), slice(*key.columns)]


def phase_of(program, mesh, weights, chunk: int, stored=None, host_rows=False):
    """A phase over packed copies of its weights, and what must stay alive with it."""
    lowered = ServingLowering(program, mesh, lambda name: 0, lambda name: 1, chunk, stored, host_rows).run()
    keep = [packed(np.ascontiguousarray(part_of(weights[key.name], key))) for key in lowered.matrices]
    vectors = [np.ascontiguousarray(weights[name][begin:end]) for name, (begin, end) in lowered.vectors]
    return ExecutionPlan(lowered, [int(ffi.cast("intptr_t", m)) for m, _ in keep], [v.ctypes.data for v in vectors]), (
        keep,
        vectors,
    )


def build(
    world,
    family: str | ModelSpec,
    transport: str,
    threads: int,
    chunk: int,
    blocks: int,
    kv_type: str,
    experts="tensor",
    prefill="auto",
    weights=None,
    forward=forward,
    **numbers,
):
    """The spec, mesh, program and weights of a random model, or of one with these weights, its executable on this rank,
    and what must stay alive with that.

    Ranks that share memory have a second phase, in which tokens are sharded; where experts are dispatched there is one
    more.
    """
    s = family if isinstance(family, ModelSpec) else spec(**{**FAMILIES, **PIECES, **LINEAR}[family], **numbers)
    prefill, layout, mesh = layouts_for(EngineConfig(transport=transport, experts=experts, prefill=prefill), world, s)
    program = trace(forward, s, layout, mesh)
    weights = weights or weights_of(program)
    phases = [phase_of(program, mesh, weights, chunk)]
    if prefill is not layout:
        tokens = trace(forward, s, prefill, mesh)
        phases.append(phase_of(tokens, mesh, weights, chunk, stored_dims(tokens, program)))
    if experts == "expert" and can_dispatch(world, prefill):
        last = (tokens, stored_dims(tokens, program)) if prefill is not layout else (program, None)
        phases.append(phase_of(last[0], mesh, weights, chunk, last[1], host_rows=True))
    communicator = open_communicator(world, transport, timeout=10.0, spins=20, arena_bytes=ARENA_BYTES)
    key_type, _, value_type = kv_type.partition("/")
    arrays = [array for cache in phases[0][0].lowered.caches.values() for array in cache.arrays]
    slots = 9 if any(array.lifetime == "sequence" for array in arrays) else 0  # also on ranks without heads
    config = CacheConfig(chunk, 4, 16 * blocks, blocks, key_type, value_type or key_type, slots, chunk)
    worker = NativeWorker(communicator, threads, (), 20)
    executable = Executable([phase for phase, _ in phases], s, communicator, config, threads, threads, worker)
    executable.join()
    return s, mesh, program, weights, executable, phases


def check(world, family: str, transport: str, threads: int, chunk: int, experts: str = "tensor") -> float:
    """Largest difference of logits over a prompt and what follows it from the cache. `experts` "expert": rows go to the
    hosts that have theirs, in every step.
    """
    s, mesh, program, weights, executable, _keep = build(world, family, transport, threads, chunk, 8, "f32", experts)
    if executable.dispatches:
        executable.dispatch_from = 0
    worst = 0.0
    if world.rank == 0:
        expected, sequence = Interpreter(program, s, mesh, weights.get), SingleSequence(executable)
        for ids in (np.arange(40), [3], [4, 5], [6, 7, 8]):
            worst = max(worst, float(np.abs(sequence.feed(ids) - expected.run(ids)).max()))
        executable.stop()
    else:
        executable.work()
    executable.close()
    return worst


def main() -> None:
    world = start_world()
    for family in sys.argv[1:]:
        for transport in ["auto", *(["mpi"] if hasattr(world, "mpi") else []), "tcp"] if world.size > 1 else ["auto"]:
            for threads, chunk in ((1, 64), (3, 16)):
                worst = check(world, family, transport, threads, chunk)
                if world.rank == 0:
                    print(f"{family} {transport} {threads} {worst:.2e}")
                    if worst > 5e-7:
                        sys.exit(f"{family} over {transport} with {threads} threads differs by {worst}")
    world.close()


if __name__ == "__main__":
    main()
