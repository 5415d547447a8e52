"""Guest program, a rank under mpirun: runs a prompt on a small model and prints the placement map when all weights are
packed, then how many sampled pages of rank 0's weights and cache are on nodes 0 and 1.

guest_map.py off|threads [refused]: packed before anything runs, or behind it; with the system calls that bind memory
refused, as in many containers.
"""

import ctypes
import struct
import sys

from ckdist.comm.world import start_world
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.placement_map import placement_map
from ckdist.engine.single import SingleSequence
from ckdist.topology.pages import sample_pages

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # of classic BPF: a word of seccomp_data, a comparison, the verdict
ALLOW, EPERM = 0x7FFF0000, 0x00050000 | 1
MBIND, SET_MEMPOLICY = 237, 238  # on x86-64
CACHE_BYTES = 16 << 20  # few enough for the huge pages that a test reserves on each node


def refuse_binding() -> None:
    lines = [
        (LOAD, 0, 0, 0),
        (EQUAL, 2, 0, MBIND),
        (EQUAL, 1, 0, SET_MEMPOLICY),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, EPERM),
    ]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    assert (
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        and libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0
    ), ctypes.get_errno()


way, refused = sys.argv[1], sys.argv[2:] == ["refused"]
world = start_world()
if refused:
    refuse_binding()
config = EngineConfig(
    model="tests/golden/llama3", threads=1, ctx_size=64, parallel=1, repack=way, kv_memory=CACHE_BYTES
)
model = load_model(config, world)
if world.rank == 0:
    logits = SingleSequence(model.executable).feed([1, 2, 3, 4], outputs="last")
    print("token", int(logits[0].argmax()), flush=True)
    model.executable.stop()
else:
    model.executable.work()
model.loader.wait()
text = placement_map(model)
if world.rank == 0:
    print(text, flush=True)
    for name, start, size in (
        ("weights", model.loader.arena, model.loader.planned_bytes),
        ("cache", model.executable.kv, model.executable.kv_bytes),
    ):
        print(name, *(sample_pages(start, size, (node,)).here for node in (0, 1)), flush=True)
model.executable.close()
world.close()
