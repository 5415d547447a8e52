"""A handler of text workers that tries to get out of its process, as code that a hostile file took over would."""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import pathlib
import resource
import signal
import socket
import threading

LIBRARY = ctypes.CDLL(None, use_errno=True)
# Numbers of x86_64 and aarch64 for calls that Python has no name for.
CALLS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "bpf": (321, 280),
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "unshare": (272, 97),
    "open_by_handle_at": (304, 265), "openat2": (437, 437), "pidfd_open": (434, 434), "execveat": (322, 281),
    "memfd_create": (319, 279), "keyctl": (250, 219), "mount": (165, 40), "setns": (308, 268), "tkill": (200, 130),
    "prctl": (157, 167), "seccomp": (317, 277), "landlock_create_ruleset": (444, 444), "socketpair": (53, 199),
    "rt_sigqueueinfo": (129, 138), "shmget": (29, 194), "inotify_init1": (294, 26), "eventfd2": (290, 19),
}  # fmt: skip


def _call(name):
    number = CALLS[name][os.uname().machine == "aarch64"]
    if LIBRARY.syscall(*map(ctypes.c_long, (number, 0, 0, 0, 0, 0))) < 0:
        raise OSError(ctypes.get_errno(), name)


ATTEMPTS = {
    "read a file": lambda: pathlib.Path("/etc/hostname").read_bytes(),
    "read the model": lambda: os.open(json.__file__, os.O_RDONLY),
    "write a file": lambda: os.open("/tmp/escaped", os.O_WRONLY | os.O_CREAT),
    "list a folder": lambda: os.listdir("/"),
    "look at a file": lambda: os.stat("/etc/hostname"),
    "remove a file": lambda: os.unlink("/tmp/escaped"),
    "open a socket": socket.socket,
    "open a Unix socket": lambda: socket.socket(socket.AF_UNIX),
    "run a program": lambda: os.execv("/bin/true", ["true"]),
    "fork": os.fork,
    "start a thread": lambda: threading.Thread(target=int).start(),
    "signal the parent": lambda: os.kill(os.getppid(), 0),
    "signal itself through kill": lambda: os.kill(os.getpid(), 0),
    "limit the parent": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU),
    "push into a terminal": lambda: fcntl.ioctl(0, 0x5412, b"x"),
    **{name: lambda name=name: _call(name) for name in CALLS},
}
ALLOWED = {
    "memory": lambda: mmap.mmap(-1, 1 << 20).close(),
    "random bytes": lambda: os.urandom(8),
    "a handler of signals": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
}


def run(_tokenizer, _head, _body):
    """By attempt, the name of errno; "" if it succeeded."""
    found = {}
    for name, attempt in {**ATTEMPTS, **ALLOWED}.items():
        try:
            attempt()
            found[name] = ""
        except (OSError, RuntimeError) as error:
            number = error.errno if isinstance(error, OSError) else errno.EPERM  # of a thread: "can't start"
            found[name] = errno.errorcode[number]
    return {"found": found, "environment": dict(os.environ)}, b""
