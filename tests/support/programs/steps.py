"""A rank program for tests of faults: `steps.py SECONDS busy|idle TRANSPORT` with the comm timeout in seconds.

Busy ranks run one step after another, idle ones wait for the first, until something fails: then the one line and exit
code 1.
"""

import sys
import time

from ckdist import native
from ckdist.comm.group import open_group
from ckdist.comm.world import leave, start_world
from ckdist.errors import CommError

lib, ffi = native.lib, native.ffi
FLOATS, ROWS, VOCAB = 1 << 16, 4, 1000

timeout, kind, transport = float(sys.argv[1]), sys.argv[2], sys.argv[3]
world = start_world()
group = open_group(world, 20, timeout, transport)
handle = group.handle
message, out, ints = ffi.new("int32_t[]", [7] * 10), ffi.new("const int32_t **"), ffi.new("int64_t *")
try:
    share = VOCAB // world.size
    native.check(lib.ckdist_group_reserve(handle, FLOATS, ROWS, VOCAB, share * world.rank, share, 100))
    print(f"rank {world.rank} began", flush=True)
    while True:
        if kind == "idle" and world.rank == 0:
            time.sleep(0.1)
            group.check_peers()
            continue
        native.check(
            lib.ckdist_group_publish(handle, message, 10)
            if world.rank == 0
            else lib.ckdist_group_receive(handle, out, ints)
        )
        for step in range(4):
            native.check(lib.ckdist_group_reduce(handle, step % 2, FLOATS >> (step * 3), step))
        native.check(lib.ckdist_group_gather(handle, ROWS, 4))
except CommError as error:
    lib.ckdist_group_abandon(handle, str(error).encode())
    print(f"ckdist: rank {world.rank}: {error}", flush=True)
    leave(1)
