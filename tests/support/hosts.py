"""Two hosts in one machine: network namespaces joined by a veth pair, each with a host name of its own, and jobs over
both.

What it is not: a measure of speed. Memory and processes are the machine's own, the network alone is separate; so MPI is
told to use TCP, and the hosts differ by name.
"""

import contextlib
import ctypes
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import psutil

from tests.support import launcher
from tests.support.delayed_link import LinkDelay, delayed_links
from tests.support.launcher import environment
from tests.support.paths import ROOT

NAMES = ("a", "b", "c", "d")
CLONE_NEWNET = 0x40000000  # of <sched.h>


def run(*words: str, check: bool = True, lines: str | None = None) -> str:
    """Runs a program with `lines` as its input, and returns its output. Raises OSError if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, input=lines)
    if check and done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def why_not() -> str | None:
    """The reason why this machine cannot have such hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "unshare", "hostname", "awk") if not shutil.which(name)]:
        return f"{', '.join(missing)} not installed"
    try:
        with Hosts():
            return None
    except OSError as error:
        return str(error)


def remove(namespaces: list[str]) -> None:
    """Kills what runs in the namespaces, and deletes them."""
    for namespace in namespaces:
        for pid in run("ip", "netns", "pids", namespace, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run("ip", "netns", "del", namespace, check=False)


def set_network(descriptor: int) -> None:
    """Moves this thread into a network namespace."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def abandoned() -> list[str]:
    """The namespaces of test runs that were killed before they could clean up."""
    found = re.findall(r"^ckdist(\d+)([a-d])\b", run("ip", "netns", "list", check=False), re.MULTILINE)
    return [f"ckdist{pid}{name}" for pid, name in found if not psutil.pid_exists(int(pid))]


class Hosts(contextlib.AbstractContextManager):
    """Two namespaces for as long as the `with` lasts; whatever still runs in them at its end is killed.

    With a delay, TUN devices take the place of the veth pair, and there may be up to four hosts.
    """

    def __init__(self, delay: LinkDelay | None = None, count: int = 2):
        self.delay, self.stack = delay, contextlib.ExitStack()
        # Several test runs on one machine keep apart by process id; the last two octets of 10.77.0.0/16 come from it
        # too. Eight addresses each, the last ones unused: four hosts end before the broadcast address.
        key = os.getpid()
        self.namespaces = [f"ckdist{key}{name}" for name in NAMES[:count]]
        self.links = [f"ck{key}{name}" for name in NAMES[:count]]
        block = key % (256 * 31)
        self.network = f"10.77.{block // 31}.{block % 31 * 8}"
        base, last = self.network.rsplit(".", 1)
        self.addresses = [f"{base}.{int(last) + 1 + i}" for i in range(count)]
        self.directory = None
        self.mounts = tuple({} for _ in range(count))  # by host: folders that its processes see at the paths of others

    def __enter__(self):
        remove(abandoned())
        try:
            made = [f"netns add {namespace}" for namespace in self.namespaces]
            if not self.delay:
                near, far = self.namespaces
                made.append(f"link add {self.links[0]} netns {near} type veth peer name {self.links[1]} netns {far}")
            run("ip", "-batch", "-", lines="\n".join(made))
            if self.delay:
                self.stack.enter_context(delayed_links(dict(zip(self.links, self.addresses, strict=True)), self.delay))
                for namespace, link in zip(self.namespaces, self.links, strict=True):
                    run("ip", "link", "set", link, "netns", namespace)
            for namespace, link, address in zip(self.namespaces, self.links, self.addresses, strict=True):
                settings = f"addr add {address}/24 dev {link}\nlink set {link} up\nlink set lo up"
                run("ip", "-n", namespace, "-batch", "-", lines=settings)
            self.directory = tempfile.mkdtemp(prefix="ckdist-hosts-")
            self.table = pathlib.Path(self.directory, "hosts")
            self.table.write_text("".join(f"{a} {n}\n" for a, n in zip(self.addresses, self.namespaces, strict=True)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        self.stack.close()
        remove(self.namespaces)
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def processes(self, *hosts: int) -> list[psutil.Process]:
        """Everything that runs on some hosts, or on all, now."""
        pids = [
            int(pid)
            for namespace in ([self.namespaces[host] for host in hosts] or self.namespaces)
            for pid in run("ip", "netns", "pids", namespace, check=False).split()
        ]
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                found.append(psutil.Process(pid))
        return found

    def ranks_named(self, name: str) -> list[psutil.Process]:
        """The processes whose program has this name."""
        return [p for p in self.processes() if p.name() == name]

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the job's ranks, by rank."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error, KeyError):
                words = process.cmdline()
                if (
                    words
                    and words[0] == sys.executable
                    and process.status() != psutil.STATUS_ZOMBIE
                    and "multiprocessing" not in " ".join(words)
                    and not set(launcher.STUB) & {*words[2:3]}  # the stub of a rank
                ):
                    environ = process.environ()
                    rank = int(environ.get("OMPI_COMM_WORLD_RANK") or environ["RANK"])
                    # rank 0's HTTP process has its rank in the environment too
                    if rank not in found or process.pid < found[rank].pid:
                        found[rank] = process
        return found

    def carried(self) -> int:
        """Bytes that crossed the link so far, both ways."""
        link = json.loads(run("ip", "-n", self.namespaces[0], "-s", "-j", "link", "show", self.links[0]))[0]
        return link["stats64"]["rx"]["bytes"] + link["stats64"]["tx"]["bytes"]

    def limit_link(self, megabits: int) -> None:
        """Both ends of the link send at most so many megabits a second, but for bursts of two milliseconds."""
        for namespace, link in zip(self.namespaces, self.links, strict=True):
            words = ["rate", f"{megabits}mbit", "burst", f"{max(32, megabits // 4)}kb", "latency", "100ms"]
            run("tc", "-n", namespace, "qdisc", "replace", "dev", link, "root", "tbf", *words)

    def drop_large_packets(self, size: int = 1300) -> None:
        """Both ends of the link drop packets of more than `size` bytes, as switches with a smaller MTU do."""
        for namespace, link in zip(self.namespaces, self.links, strict=True):
            words = ["rate", "1gbit", "burst", str(size), "latency", "100ms"]
            run("tc", "-n", namespace, "qdisc", "replace", "dev", link, "root", "tbf", *words)

    def set_link(self, state: str) -> None:
        """`up` or `down`."""
        run("ip", "-n", self.namespaces[0], "link", "set", self.links[0], state)

    def reset_connections(self, count: int, but: int = 22) -> None:
        """Both ends of all TCP connections over the link get a reset, but those of one port. Waits for `count`."""
        choice = ("state", "established", "dst", self.addresses[1], "dport", "!=", str(but))
        end = time.monotonic() + 20
        with self.entered(0):
            while len(run("ss", "-tHn", *choice).splitlines()) < count:
                if time.monotonic() > end:
                    raise OSError(f"there are no {count} connections")
                time.sleep(0.02)
            run("ss", "-K", *choice)

    def inside(self, host: int, *words: str) -> list[str]:
        """The command that runs `words` on a host."""
        binds = "".join(f"mount --bind '{there}' '{place}' && " for place, there in self.mounts[host].items())
        return [
            "ip",
            "netns",
            "exec",
            self.namespaces[host],
            "unshare",
            "--uts",
            "--mount",
            "bash",
            "-c",
            f'{binds}hostname {self.namespaces[host]} && exec "$@"',
            "bash",
            *words,
        ]

    @contextlib.contextmanager
    def entered(self, host: int):
        """This thread is in the host's network while the `with` lasts, and so are the sockets that it opens."""
        there, here = (
            os.open(path, os.O_RDONLY) for path in (f"/run/netns/{self.namespaces[host]}", "/proc/thread-self/ns/net")
        )
        try:
            set_network(there)
            yield
        finally:
            set_network(here)
            os.close(there)
            os.close(here)

    def torchrun(self, each: int, *words: str, **more) -> list[subprocess.Popen]:
        """Starts `python words...` on `each` ranks of every host as torchrun would, without a launcher; rank 0 is
        the first.
        """
        secret = pathlib.Path(self.directory, "secret")
        secret.write_text("a secret of this job alone")
        secret.chmod(0o600)
        started, size = [], len(self.namespaces) * each
        for rank in range(size):
            told = {
                "RANK": rank,
                "WORLD_SIZE": size,
                "MASTER_ADDR": self.addresses[0],
                "MASTER_PORT": 29500,
                "CKDIST_JOB_SECRET_FILE": secret,
                "CKDIST_START_TIMEOUT": 60,
            }
            env = {**environment(), **{name: str(value) for name, value in told.items()}}
            command = self.inside(rank // each, *launcher.STUB, sys.executable, *words)
            started.append(
                subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=ROOT,
                    **more,
                )
            )
        return started

    def start(self, each: int, *words: str, **more) -> subprocess.Popen:
        """Starts `python words...` on `each` ranks of either host; its output is text, standard error included."""
        subnet = f"{self.network}/30"
        mpirun = shutil.which("mpirun", path=environment()["PATH"])
        agent = {"plm_ssh_agent": str(ROOT / "launch/netns-agent"), "prte_if_include": subnet}
        # on one machine MPI would find shared memory
        settings = {"pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": subnet}
        command = [mpirun]
        for name, value in agent.items():
            command += ["--prtemca", name, value]
        for name, value in settings.items():
            command += ["--mca", name, value]
        hostfile = pathlib.Path(self.directory, f"slots{each}")
        hostfile.write_text("".join(f"{a} slots={each}\n" for a in self.addresses))
        # both hosts would bind to the same cores
        command += ["--hostfile", str(hostfile), "--bind-to", "none", "-n", str(2 * each)]
        for name in ("PYTHONPATH", "PATH"):
            command += ["-x", name]
        env = {**environment(), "CKDIST_NETNS": str(self.table)}
        del env["PRTE_MCA_rmaps_default_mapping_policy"]  # oversubscription would put all ranks on the first host
        return subprocess.Popen(
            self.inside(0, *command, *launcher.STUB, sys.executable, *words),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            **more,
        )

    def run(self, each: int, *words: str, timeout: float = 60) -> tuple[int, str]:
        """As start(), to its end: exit code and output."""
        process = self.start(each, *words)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, output

    @staticmethod
    def wait_ended(processes: list[psutil.Process], seconds: float) -> bool:
        """Have all ended within the time? Their exit codes are left to who started them."""
        end = time.monotonic() + seconds

        def ended(process: psutil.Process) -> bool:
            try:
                return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True

        while not (done := all(map(ended, processes))) and time.monotonic() < end:
            time.sleep(0.02)
        return done

    def wait_empty(self, seconds: float) -> list[str]:
        """Waits until no rank is left; returns the command lines of those that are."""
        end = time.monotonic() + seconds
        while (left := self.ranks()) and time.monotonic() < end:
            time.sleep(0.05)
        return [f"rank {r}: {' '.join(p.cmdline())}" for r, p in left.items()]


def kill_left(process: psutil.Process) -> None:
    """Kills a process as a launcher would. A test may have killed it before."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


class Output:
    """What a job prints, line by line as it comes."""

    def __init__(self, *processes: subprocess.Popen):
        self.processes, self.process, self.lines = processes, processes[0], []
        self.threads = [threading.Thread(target=self.read, args=(p,), daemon=True) for p in processes]
        for thread in self.threads:
            thread.start()

    def read(self, process: subprocess.Popen) -> None:
        self.lines.extend(iter(process.stdout.readline, ""))

    def wait(self, seconds: float) -> list[int]:
        """The exit codes, once all output has been read."""
        try:
            codes = [process.wait(seconds) for process in self.processes]
        except subprocess.TimeoutExpired:
            left = "\n".join(self.left())
            raise AssertionError(f"it has not ended after {seconds} s:\n{left}\n{self.text()}") from None
        for thread in self.threads:
            thread.join(5)
        return codes

    def left(self) -> list[str]:
        """The processes of the job that still run, and the place in the kernel where each of their threads waits."""
        found = []
        for process in self.processes:
            with contextlib.suppress(psutil.Error, OSError):
                first = psutil.Process(process.pid)
                for one in (first, *first.children(recursive=True)):
                    waits = [path.read_text() for path in pathlib.Path(f"/proc/{one.pid}/task").glob("*/wchan")]
                    found.append(f"{one.pid} {one.status()} {' '.join(one.cmdline())[:150]} {waits}")
        return found

    def wait_for(self, pattern: str, count: int = 1, seconds: float = 60) -> str:
        """The first match of `pattern`, once it has come `count` times."""
        end = time.monotonic() + seconds
        while len(found := re.findall(pattern, self.text())) < count:
            assert time.monotonic() < end, f"no {count} of {pattern!r} within {seconds} s in:\n{self.text()}"
            time.sleep(0.02)
        return found[0]

    def text(self) -> str:
        return "".join(self.lines)


def start(hosts, launcher: str, each: int, *words: str) -> Output:
    """The job under mpirun, or its ranks without a launcher."""
    return Output(*([hosts.start(each, *words)] if launcher == "mpirun" else hosts.torchrun(each, *words)))
