"""A rank program: `copied_blocks.py FOLDER` copies blocks of the cache to a slab and, to other places, in again. Rank
0 compares the logits with those of blocks that stayed, and the trace must show copies beside steps on every rank. A
rank alone ends with a disk that does not answer.
"""

import ctypes
import json
import os
import pathlib
import signal
import sys
import time
from collections import defaultdict

import numpy as np

from ckdist import native
from ckdist.comm.world import leave, start_world
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.errors import NativeError
from ckdist.program.step_batch import BLOCK_TOKENS, Batch
from tests.support.situations import driven

PROMPT, STORE = 40, 64
GARBAGE, PLACES = range(100, 100 + PROMPT), ((0, 1, 2), (9, 7, 8))


def copy(executable, pairs, into_cache: bool) -> int:
    """Copies pairs of a block and a slot, whose number is also its name."""
    rows = np.zeros(len(pairs), native.dtype("ckdist_block_copy"))
    rows["place"], rows["slot"] = np.array(pairs).T
    rows["entry"]["name"][:, 0] = rows["slot"]
    return executable.copy_blocks(rows, into_cache)


def run(executable, ids, first: int, table, copies: int = 0) -> np.ndarray:
    """The logits of the last of some tokens, whose sequence has its blocks in `table`."""
    blocks = -(-(first + len(ids)) // BLOCK_TOKENS)
    batch = Batch(
        np.array(ids, np.int32),
        np.array([[len(ids), first, blocks]], np.int32),
        np.array(table[:blocks], np.int32),
        np.array([len(ids) - 1], np.int32),
    )
    return executable.run(batch, copies).copy()


def body(executable) -> None:
    before, after = PLACES
    run(executable, range(PROMPT), 0, before)
    expected = run(executable, [3], PROMPT, before)
    others = threads()
    out = copy(executable, [(block, 20 + i) for i, block in enumerate(before)], into_cache=False)
    copiers = threads() - others  # other ranks of this process may start threads, too
    run(executable, GARBAGE, 0, before, out)
    assert not np.array_equal(run(executable, [3], PROMPT, before), expected)
    back = copy(executable, [(block, 20 + i) for i, block in enumerate(after)], into_cache=True)
    assert np.array_equal(run(executable, [3], PROMPT, after, back), expected)
    results = executable.worker.copy_results()["results"][:, 1:3]
    assert (results["good"] == len(before)).all() and (results["error"] == 0).all()
    many = [(block % 3 + 12, block) for block in range(STORE)]
    for _ in range(10):  # of blocks that no step uses
        for _ in range(16):
            copy(executable, many, into_cache=False)
        run(executable, GARBAGE, 0, range(16, 32))
    assert np.array_equal(run(executable, [3], PROMPT, after), expected)
    if executable.worker.communicator.size == 1:
        (copier,) = copiers
        stuck(executable, copier)


def threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


def stuck(executable, copier: int) -> None:
    """A step waits for a copy whose disk does not answer: the copier's thread sleeps in the handler of a signal. It has
    ended its copies before: a signal may not find it with a lock that the step needs.
    """
    stat = pathlib.Path(f"/proc/self/task/{copier}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.01)
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGUSR1, ctypes.cast(libc.pause, ctypes.c_void_p))
    libc.tgkill(os.getpid(), copier, signal.SIGUSR1)
    try:
        run(executable, GARBAGE, 0, range(16, 32), copy(executable, [(12, 0)], into_cache=False))
    except NativeError as error:
        assert "no block was read or written within 2 s" in str(error), error
        executable.worker.close()
        print("a disk that does not answer was named", flush=True)
        leave(0)


def overlapping(events) -> set[int]:
    """The ranks on which a copy ran beside a step."""
    steps, copies = defaultdict(list), defaultdict(list)
    for event in events:
        if event.get("cat") in ("batch", "cache") and event["name"] != "publish":
            which = copies if event["cat"] == "cache" else steps
            which[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    return {
        rank
        for rank, those in copies.items()
        if any(begin < end and first < last for first, end in those for begin, last in steps[rank])
    }


def job(world, folder: str) -> None:
    """Every rank's part."""
    file = pathlib.Path(folder, "trace.json")
    config = EngineConfig(
        threads=1, ctx_size=512, parallel=1, comm_timeout=30.0 if world.size > 1 else 2.0, trace=str(file),
        cache_type_k="f32", cache_type_v="f32",
    )  # fmt: skip
    model = load_model(config, world)
    files = [os.open(pathlib.Path(folder, f"{name}-{world.rank}"), os.O_RDWR | os.O_CREAT) for name in ("i", "d")]
    model.executable.set_slab("blocks", *files, STORE)
    driven(world, model.executable, body)
    model.close()
    if world.rank == 0:
        found = overlapping(json.loads(file.read_text())["traceEvents"])
        assert found == set(range(world.size)), f"copies ran beside steps on ranks {found} of {world.size}"
        print("blocks were copied beside steps", flush=True)


def main() -> None:
    world = start_world()
    job(world, sys.argv[1])
    world.close()


if __name__ == "__main__":
    main()
