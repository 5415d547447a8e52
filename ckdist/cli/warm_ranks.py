"""The process that forks ranks: `ckdist/launcher/rank_forker.py` starts it and sends requests to it."""

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import pathlib
import signal
import socket
import sys
import time
from typing import Any

from ckdist.cli.frozen_import import frozen_import
from ckdist.comm.bootstrap.launched_world import inherited
from ckdist.launcher.rank_forker import FORK_SECONDS, GO, MAX_DESCRIPTORS, MAX_MESSAGE, WARM_VARIABLE
from ckdist.prctl import die_with_parent

NAME = b"ckdist, which forks ranks\0"  # for ps
ARGUMENTS, VARIABLES = 45, 47  # places in /proc/self/stat, after the name
# Ranks of most models use these modules. Others are imported by the rank.
ENGINE = (
    *("engine.load_model", "engine.model_engine", "engine.grammar_compiler", "engine.drafting", "engine.draft_gain"),
    *("models.from_gguf", "models.from_config", "models.families.llama", "cli.command_ranks", "cli.start_lines"),
    *("weights.gguf_checkpoint", "weights.kept_weights", "weights.copies", "tokens.tokenizer_from_gguf"),
    *(f"program.ops.{name}" for name in ("attention_ops", "embedding", "linear", "output_rows", "rms_norm")),
)
MODULES = {
    "serve": (*ENGINE, "cli.serve_ranks", "cli.serve_rank_0", "cli.engine_rank_0"),
    "generate": (*ENGINE, "cli.generate"),
    "train": ("cli.train",),
    "tune": ("cli.tune",),
}


class Shown:
    """The bytes of this process's memory that /proc shows as its arguments or its variables."""

    def __init__(self, place: int) -> None:
        fields = pathlib.Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        self._begin = int(fields[place])
        self._size = int(fields[place + 1]) - self._begin
        self.before = ctypes.string_at(self._begin, self._size)

    def replace(self, data: bytes) -> None:
        """Shows `data`, if there is room for it."""
        if len(data) <= self._size:
            ctypes.memmove(self._begin, data.ljust(self._size, b"\0"), self._size)


def fork_ranks(command: str = "") -> None:
    """Imports the modules of a command, and forks a rank at each request. Returns in the ranks only.

    The process ends with its parent, and if threads run, since a fork has none of them.
    """
    parent = os.getppid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # those of a terminal are for ranks
    try:
        control = inherited(os.environ.pop(WARM_VARIABLE).strip())[0]
        for module in MODULES.get(command, ()):
            frozen_import(f"ckdist.{module}")
        words = Shown(ARGUMENTS)
        words.replace(NAME)
        if not _can_fork({0, 1, 2, control.fileno()}):
            os._exit(1)
    except BaseException:
        os._exit(1)  # the ranks are then started, and report the reason
    gc.collect()
    gc.freeze()
    control.send(b"1")
    while True:
        data, fds = b"", list[int]()
        with contextlib.suppress(OSError):
            data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, MAX_DESCRIPTORS + 4)
        if not data:
            os._exit(0)
        if (child := os.fork()) == 0:
            if os.fork():
                os._exit(0)  # so that the parent of this process adopts the rank
            break
        os.waitpid(child, 0)
        for fd in fds:
            os.close(fd)
    try:
        control.close()
        words.replace(words.before)
        _become_rank(json.loads(data), fds, parent)
    except BaseException:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _can_fork(known: set[int]) -> bool:
    """Returns True if this process has one thread and no other open files. Coverage counts no lines after a fork."""
    with os.scandir("/proc/self/fd") as entries:
        descriptors = {int(entry.name) for entry in entries}
    is_open = lambda fd: pathlib.Path(f"/proc/self/fd/{fd}").is_symlink()  # that of the listing is closed again
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208, names alone
    return threads == 1 and {fd for fd in descriptors if is_open(fd)} == known and "coverage" not in sys.modules


def _become_rank(about: dict[str, Any], fds: list[int], parent: int) -> None:
    """Sets up this process like a started rank, reports its process id, and waits until that has arrived."""
    deadline = time.monotonic() + FORK_SECONDS
    while os.getppid() != parent and time.monotonic() < deadline:
        time.sleep(0.0002)
    die_with_parent(parent)
    if about["own_group"]:
        os.setsid()
    numbers = (0, 1, 2, *about["descriptors"])
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved[1:], numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(about["environment"])
    for name in os.environ:
        os.environ[name] = os.environ[name]  # copies it, since its first place is overwritten
    Shown(VARIABLES).replace(b"".join(b"%b=%b\0" % pair for pair in os.environb.items()))
    with socket.socket(fileno=moved[0]) as reply:
        reply.settimeout(FORK_SECONDS)
        reply.send(b"%d" % os.getpid())
        if reply.recv(1) != GO:
            os._exit(1)
