"""Landlock: restricts the files that a process may read. It may write, run and create none.

https://docs.kernel.org/userspace-api/landlock.html
"""

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from ckdist.prctl import kernel_call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls, the same on every machine
VERSION_FLAG, PATH_BENEATH = 1, 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # version -> kinds of access that can be refused; 16 from version 5 on
TCP_RIGHTS = 3  # bind and connect, from version 4 on
SCOPES = 3  # abstract Unix sockets and signals stay among confined processes, from version 6 on


def read_only(paths: Iterable[Path]) -> str | None:
    """Lets this process and those that it starts read files beneath `paths`, and open no others.

    Returns:
        None, or the reason why this kernel cannot do so.
    """
    version, problem = kernel_call(CREATE_RULESET, None, 0, VERSION_FLAG)
    if problem:
        return f"Landlock: {os.strerror(problem)}"
    rights = (1 << FILE_RIGHTS.get(version, 16)) - 1
    fields = [rights, *([TCP_RIGHTS] if version >= 4 else []), *([SCOPES] if version >= 6 else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset, problem = kernel_call(CREATE_RULESET, ctypes.c_char_p(attributes), len(attributes), 0)
    if problem:
        return f"Landlock: {os.strerror(problem)}"
    try:
        for path in paths:
            with contextlib.suppress(FileNotFoundError, PermissionError, NotADirectoryError):
                _permit(ruleset, path)
        _, problem = kernel_call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return None if not problem else f"Landlock: {os.strerror(problem)}"


def _permit(ruleset: int, path: Path) -> None:
    """Permits reading at or beneath `path`. Raises OSError if it cannot be opened."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        rule = struct.pack("=Qi", READ_FILE | (READ_DIR if is_folder else 0), descriptor)
        kernel_call(ADD_RULE, ruleset, PATH_BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(descriptor)
