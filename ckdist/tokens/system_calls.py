"""A seccomp filter: the system calls that text workers may make, and no others.

https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterator, Mapping

from ckdist.prctl import kernel_call

# name: (x86_64, aarch64); None: the machine has no such call
IN_MEMORY = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "poll": (7, None), "ppoll": (271, 73), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214), "readv": (19, 65), "writev": (20, 66), "select": (23, None), "pselect6": (270, 72),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
    "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210),
    "getitimer": (36, 102), "setitimer": (38, 103), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "uname": (63, 160), "sysinfo": (99, 179),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "getrusage": (98, 165), "getrandom": (318, 278),
    "futex": (202, 98), "set_robust_list": (273, 99), "get_robust_list": (274, 100), "rseq": (334, 293),
    "membarrier": (324, 283), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "exit": (60, 93), "exit_group": (231, 94), "restart_syscall": (219, 128),
    "prlimit64": (302, 261), "fcntl": (72, 25), "ioctl": (16, 29), "tgkill": (234, 131),
}  # fmt: skip
# Also needed to read files and fork workers.
LOADING = {
    "openat": (257, 56), "newfstatat": (262, 79), "fstat": (5, 80), "stat": (4, None), "lstat": (6, None),
    "statx": (332, 291), "readlink": (89, None), "readlinkat": (267, 78), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "getdents64": (217, 61), "getcwd": (79, 17),
    "pread64": (17, 67), "fadvise64": (221, 223), "statfs": (137, 43), "fstatfs": (138, 44), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "pipe2": (293, 59), "wait4": (61, 260), "kill": (62, 129),
    "clone": (56, 220), "set_tid_address": (218, 96), "prctl": (157, 167), "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
}  # fmt: skip
CLONE3 = 435
# name: (argument, its permitted values)
VALUES: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "prlimit64": (0, (0,)),  # this process
    "fcntl": (1, (0, 1, 2, 3, 4, 1030)),  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
    "ioctl": (1, (0x5421, 0x5401)),  # FIONBIO, TCGETS
    "prctl": (0, (1, 38)),  # PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS
}
# name: (argument, its forbidden bits)
FORBIDDEN_BITS = {
    "openat": (2, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC),
    "clone": (0, 0x7E020080),  # a new namespace of any kind
}

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, AUDIT_ARCH
LOAD, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
FIRST_X32 = 0x40000000
SET_MODE_FILTER, ALL_THREADS = 1, 1


def allow_calls(loading: bool) -> str | None:
    """Lets all other system calls fail with EPERM, in this process and in those that it starts.

    Args:
        loading: Also allow reading files and forking processes.

    Returns:
        None, or the reason why this kernel or machine has no such filter.
    """
    if platform.machine() not in MACHINES or sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return f"no seccomp filter for {platform.machine()}"
    program = b"".join(_program(loading, *MACHINES[platform.machine()]))
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    number = LOADING["seccomp"][MACHINES[platform.machine()][0]]
    _, problem = kernel_call(number, SET_MODE_FILTER, ALL_THREADS, ctypes.c_char_p(filter_))
    return None if not problem else f"seccomp: {os.strerror(problem)}"


def _program(loading: bool, column: int, architecture: int) -> Iterator[bytes]:
    """The filter's instructions, 8 bytes each."""
    yield _step(LOAD, ARCHITECTURE)
    yield _step(EQUAL, architecture, 1, 0)
    yield _step(RETURN, KILL_PROCESS)
    yield _step(LOAD, NUMBER)
    if column == 0:
        yield _step(AT_LEAST, FIRST_X32, 0, 1)
        yield _step(RETURN, ERRNO | errno.EPERM)
    values = dict(VALUES)
    if not loading:
        values["tgkill"] = (0, (os.getpid(),))
    for name, numbers in {**IN_MEMORY, **(LOADING if loading else {})}.items():
        number = numbers[column]
        if number is None:
            continue
        if name in values:
            body = list(_one_of(*values[name]))
        elif name in FORBIDDEN_BITS:
            argument, bits = FORBIDDEN_BITS[name]
            body = [
                _load(argument),
                _step(ANY_BIT, bits, 1, 0),
                _step(RETURN, ALLOW),
                _step(RETURN, ERRNO | errno.EPERM),
            ]
        else:
            body = [_step(RETURN, ALLOW)]
        yield _step(EQUAL, number, 0, len(body))
        yield from body
    yield _step(EQUAL, CLONE3, 0, 1)
    yield _step(
        RETURN, ERRNO | errno.ENOSYS
    )  # a filter cannot read its flags, which are in memory; the C library then uses clone
    yield _step(RETURN, ERRNO | errno.EPERM)


def _one_of(argument: int, values: tuple[int, ...]) -> Iterator[bytes]:
    yield _load(argument)
    for value in values:
        yield _step(EQUAL, value, 0, 1)
        yield _step(RETURN, ALLOW)
    yield _step(RETURN, ERRNO | errno.EPERM)


def _load(argument: int) -> bytes:
    """Loads the lower 32 bits of an argument."""
    return _step(LOAD, ARGUMENTS + 8 * argument)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
