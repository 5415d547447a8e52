"""Starts Python programs of tests as forks of one interpreter that has imported the whole package.

A start from nothing costs 0.1 to 0.8 seconds of CPU, and tests start more than a thousand programs. Within
`warm_starts()`, `subprocess.Popen` takes a fork if a program's environment is the given one in all that interpreters
and libraries read while they start. Other programs start as ever, and so does everything within `cold_starts()`.

A fork is a child of this process (CLONE_PARENT): waits, signals and the tree of processes are those of any child. What
differs: all modules of the package are imported already. A program that starts others (`STARTS_OTHERS`) has such an
interpreter of its own as a child.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import os
import pickle
import pkgutil
import platform
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

from ckdist.launcher.rank_forker import WARM_VARIABLE

CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())  # the system call's number
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000  # of <sched.h>
PR_GET_TID_ADDRESS, PR_SET_MM, PR_SET_MM_MAP = 40, 35, 14
MAX_MESSAGE, MAX_DESCRIPTORS, ABOVE = 1 << 17, 64, 400  # ABOVE: no fork is given so high a descriptor
REPLY_SECONDS = 60.0
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "OPENBLAS_", "OMP_", "NPY_", "MALLOC_", "GLIBC_", "OPENSSL_")
READ_AT_START += ("CKDIST_LIBRARY",)
OF_MPIRUN = os.path.join(sys.prefix, "lib")
OURS = "tests.support.warm_starts"
STARTS_OTHERS = {"ckdist.serve", "ckdist.launcher.agent", "serve", "launch", "-tp"}  # a module, commands and a flag
FLAGS = {"-P"}
PYTHON, SCRIPT = sys.executable, os.path.join(os.path.dirname(sys.executable), "ckdist")
COLD: list = []  # not empty within cold_starts()
SHOWN: list = []  # the memory that /proc/PID/cmdline shows


class Template:
    """The interpreter, as the process sees it whose children its forks are. It ends when `control` is closed.

    It starts with the first program if `control` is not given.
    """

    def __init__(self, environment: Mapping[str, str], control: socket.socket | None = None):
        self.environment, self.control, self.process = environment, control, None
        self.lock, self.network, self.read = threading.Lock(), network(), at_start(environment)
        self.refuses = bool(why_not())

    def begin(self) -> socket.socket:
        """Starts the interpreter."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words, started = [PYTHON, "-m", OURS], {"stdin": theirs, "stdout": subprocess.DEVNULL}
        with theirs, cold_starts():
            self.process = subprocess.Popen(words, env=self.environment, **started)
        return control

    def close(self) -> None:
        """Ends the interpreter, but not its forks."""
        if self.process:
            self.control.close()
            self.process.kill()
            self.process.wait()

    def takes(self, call: dict) -> bool:
        """True if a fork can be the program of this call of `Popen`."""
        words, env = words_of(call), environment_of(call)
        special = self.refuses or call["shell"] or call["executable"] or not call["close_fds"]
        special = special or any(call[name] not in (None, -1) for name in ("gid", "gids", "uid", "umask"))
        special = special or not isinstance(call["preexec_fn"], functools.partial | None)
        special = special or any(number >= ABOVE - 2 for number in call["pass_fds"])
        if special or words[0] != PYTHON or len(call["pass_fds"]) > MAX_DESCRIPTORS - 3:
            return False
        if not all(isinstance(word, str) for word in (*words, *env)) or (found := program_of(words)) is None:
            return False
        read, path = at_start(env), "PYTHONPATH"
        if found[0] == "-m" and found[1].startswith("ckdist.") and read == at_start(os.environ) and path in self.read:
            read = {**read, path: self.read[path]}  # modules of the package are found without it, too
        return read == self.read and network() == self.network

    def start(self, call: dict) -> int | None:
        """Starts the program, and returns its process number; None if it must start in the other way."""
        streams = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if given == -1 else given for own, given in enumerate(streams)]
        request = {
            "words": words_of(call),
            "folder": call["cwd"] or os.getcwd(),
            "environment": dict(environment_of(call)),
            "session": call["start_new_session"],
            "group": call.get("process_group", -1),
            "before": call["preexec_fn"],
            "targets": [0, 1, 2, *map(int, call["pass_fds"])],
            "cpus": os.sched_getaffinity(0),
            "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        }
        if len(message := pickle.dumps(request)) > MAX_MESSAGE:
            return None
        with self.lock:
            try:
                self.control = self.control or self.begin()
                self.control.settimeout(REPLY_SECONDS)
                socket.send_fds(self.control, [message], [*streams, *call["pass_fds"]])
                pid, refused = pickle.loads(self.control.recv(MAX_MESSAGE))
            except (OSError, EOFError):
                self.refuses = True  # a late reply would be taken for that to the next request
                return None
        if refused:
            os.waitpid(pid, 0)
        return None if refused else pid


def environment_of(call: dict) -> Mapping[str, str]:
    return os.environ if call["env"] is None else call["env"]


def words_of(call: dict) -> list[str]:
    """The words of the program. The console script `ckdist` is a file that the interpreter runs."""
    words = list(call["args"]) if isinstance(call["args"], list | tuple) else [call["args"]]
    if words[0] == "ckdist" and shutil.which("ckdist", path=environment_of(call).get("PATH")) == SCRIPT:
        words[:1] = [PYTHON, SCRIPT]
    return words


def network() -> str:
    return os.readlink("/proc/thread-self/ns/net")


def at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that interpreters and libraries read while they start.

    mpirun adds the folder of its libraries to LD_LIBRARY_PATH. mpi4py finds them without it.
    """
    read = {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}
    folders = read.pop("LD_LIBRARY_PATH", "").split(os.pathsep)
    if set(folders) - {"", OF_MPIRUN}:
        read["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    return read


def program_of(words: Sequence[str]) -> tuple[str, ...] | None:
    """("-m", module, arguments…), ("-c", code, arguments…) or ("file", name, arguments…); None for other flags."""
    rest = [word for i, word in enumerate(words) if i > 1 or (i == 1 and word not in FLAGS)]
    if len(rest) > 1 and rest[0] in ("-m", "-c"):
        return tuple(rest)
    return None if not rest or rest[0].startswith("-") else ("file", *rest)


@contextlib.contextmanager
def warm_starts(environment: dict[str, str]) -> Iterator[None]:
    """Programs with this environment are forks while the `with` lasts."""
    original = subprocess.Popen._execute_child
    with contextlib.closing(Template(environment)) as template:
        subprocess.Popen._execute_child = forks_of(template, original)
        try:
            yield
        finally:
            subprocess.Popen._execute_child = original


def forks_of(template: Template, original: Callable) -> Callable:
    """The method of `subprocess.Popen` that starts a program: as a fork of `template` if it can."""
    signature = inspect.signature(original)

    def execute_child(popen, *arguments, **more):
        call = signature.bind(popen, *arguments, **more).arguments
        pid = template.start(call) if not COLD and template.takes(call) else None
        if pid is None:
            original(popen, *arguments, **more)
        else:
            popen.pid, popen._child_created = pid, True
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            popen._close_pipe_fds(*(call[end] for end in ends))

    return execute_child


@contextlib.contextmanager
def cold_starts() -> Iterator[None]:
    """All programs start from nothing while the `with` lasts."""
    COLD.append(True)
    try:
        yield
    finally:
        COLD.pop()


def thread_address() -> int | None:
    """The address to which the kernel writes the number of this thread, if it can be read."""
    address = ctypes.c_void_p()
    refused = ctypes.CDLL(None).prctl(PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return None if refused else address.value


def why_not() -> str | None:
    """The reason why programs start from nothing here, or None."""
    if not CLONE or thread_address() is None:
        return "this machine or kernel cannot fork a child of another process"
    measured = "coverage" in sys.modules or "LD_PRELOAD" in os.environ
    return "coverage counts and sanitizers check new processes only" if measured else None


def fork() -> int:
    """As os.fork(), but the new process is a child of this one's parent. It has the same single thread."""
    address = thread_address()
    flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | signal.SIGCHLD
    order = (0, 0, address, 0) if platform.machine() == "x86_64" else (0, 0, 0, address)
    call = ctypes.PyDLL(None).syscall  # keeps the GIL
    call.restype, call.argtypes = ctypes.c_long, [ctypes.c_long] * 6
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = call(CLONE, flags, *order)
    (ctypes.pythonapi.PyOS_AfterFork_Parent if pid else ctypes.pythonapi.PyOS_AfterFork_Child)()
    return pid


def serve() -> dict:
    """Forks for each request on standard input until its end. Returns in a fork, with the request."""
    control = socket.socket(fileno=0)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        pid = fork()
        if pid == 0:
            request, refused = pickle.loads(data), ""
            if nested(request, descriptors):
                continue
            with socket.socket(fileno=os.dup2(control.detach(), ABOVE - 1, inheritable=False)) as reply:
                try:
                    become(request, descriptors)
                except Exception as error:
                    refused = repr(error)
                reply.send(pickle.dumps((os.getpid(), refused)))
            if refused:
                os._exit(1)
            return request
        assert pid > 0, "no fork"
        for descriptor in descriptors:
            os.close(descriptor)


def nested(request: dict, descriptors: list[int]) -> bool:
    """Forks the interpreter of a program that starts others; returns True in that.

    The process that forks ranks may have no other descriptors, as the interpreter's. It enters the namespaces that the
    program will enter (tests/support/stubs.py).
    """
    if not STARTS_OTHERS & set(request["words"]) or WARM_VARIABLE in request["environment"]:
        return False
    namespaces = [number for number in descriptors[3:] if os.readlink(f"/proc/self/fd/{number}").startswith("net:")]
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for number in descriptors[3:] if namespaces else ():
            assert ctypes.CDLL(None).setns(number, 0) == 0, "no namespace"
        os.dup2(theirs.detach(), 0)
        own.detach()
        os.closerange(3, ABOVE)
        return True
    theirs.close()
    high = os.dup2(own.detach(), ABOVE - 2, inheritable=False)  # no descriptor of the program takes its place
    template = Template(request["environment"], socket.socket(fileno=high))
    template.network = os.readlink(f"/proc/self/fd/{namespaces[0]}") if namespaces else template.network
    subprocess.Popen._execute_child = forks_of(template, subprocess.Popen._execute_child)
    return False


def become(request: dict, descriptors: list[int]) -> None:
    """Gives this process the streams, folder, environment, session, CPUs and signals of a program."""
    os.chdir(request["folder"])
    high = range(ABOVE, ABOVE + len(descriptors))
    for descriptor, number in zip(descriptors, high, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, target in zip(high, request["targets"], strict=True):
        os.dup2(number, target)
        os.close(number)
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    if request["before"]:
        request["before"]()
    os.sched_setaffinity(0, request["cpus"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        more = {"encoding": old.encoding, "errors": old.errors, "closefd": False}
        stream = open(descriptor, "w" if descriptor else "r", 1 if descriptor == 2 else -1, **more)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environment"])
    if "PYTHONPATH" not in os.environ:
        sys.path[1:] = [name for name in sys.path[1:] if name not in own]
    show(request["words"], request["environment"])


def show(words: list[str], environment: dict[str, str]) -> None:
    """Sets what /proc/PID/cmdline and environ show."""
    texts = words, [f"{name}={value}" for name, value in environment.items()]
    shown = [b"".join(os.fsencode(text) + b"\0" for text in some) for some in texts]
    memory = SHOWN[:] = [ctypes.create_string_buffer(b"".join(shown))]
    begin = ctypes.addressof(memory[0])
    middle, end = begin + len(shown[0]), begin + len(shown[0]) + len(shown[1])
    with open("/proc/self/stat", "rb") as file:
        fields = [b"", b"", *file.read().rpartition(b")")[2].split()]
    library = ctypes.CDLL(None, use_errno=True)
    library.sbrk.restype = ctypes.c_void_p
    places = [int(fields[number - 1]) for number in (26, 27, 45, 46, 47)]
    places += [library.sbrk(0), int(fields[27]), begin, middle, middle, end, 0]
    layout = struct.pack("12Q2I", *places, 0, 0xFFFFFFFF)  # struct prctl_mm_map; no auxv, no exe
    if library.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.c_char_p(layout), ctypes.c_ulong(len(layout)), 0):
        raise OSError(ctypes.get_errno(), "PR_SET_MM_MAP")


def program(words: list[str]) -> Callable[[], object]:
    """Makes the function that runs the program in a fresh `__main__`, with its folder first in sys.path."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    sys.orig_argv = words
    what, name, *arguments = program_of(words)
    first = {"-c": "", "-m": os.getcwd(), "file": os.path.dirname(os.path.abspath(name))}[what]
    sys.path[:1] = [] if words[1] in FLAGS else [first]
    if what == "-m":
        for module in (name, f"{name}.__main__"):
            sys.modules.pop(module, None)
        sys.argv = ["-m", *arguments]
        return lambda: runpy._run_module_as_main(name)
    if what == "-c":
        sys.argv = ["-c", *arguments]
        code = compile(name, "<string>", "exec")
    else:
        sys.argv, main.__file__ = [name, *arguments], name
        with open(name, "rb") as file:
            code = compile(file.read(), name, "exec")
    return lambda: exec(code, main.__dict__)


def print_error(kind, error, trace) -> None:
    """Prints an error without the frames up to this file's last one."""
    frames = [trace]
    while frames[-1]:
        frames.append(frames[-1].tb_next)
    own = [i for i, frame in enumerate(frames[:-1]) if frame.tb_frame.f_code.co_filename == __file__]
    trace = frames[own[-1] + 1] if own else trace
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def preload() -> None:
    """Imports the package, and checks that this process can be forked: it must have one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    import ckdist

    for found in pkgutil.walk_packages(ckdist.__path__, "ckdist."):
        if not found.name.endswith((".__main__", ".libckdist")):
            importlib.import_module(found.name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads"
    assert "huggingface_hub" not in sys.modules, "it reads variables when it is imported"
    show(sys.orig_argv, dict(os.environ))  # fails here if this kernel cannot do it
    gc.freeze()
    gc.enable()


def run(words: list[str]) -> None:
    """Runs the program, and ends this process without freeing what was imported for others."""
    code = 0
    try:
        program(words)()
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            raise
    importlib.import_module("ckdist.process_end").end_process(code)
    sys.exit(code)


if __name__ == "__main__":
    preload()
    sys.excepthook = print_error
    run(serve()["words"])
