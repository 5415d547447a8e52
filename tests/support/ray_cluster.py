"""A Ray of two nodes in this machine, each in a network namespace with a host name of its own (`Hosts`)."""

import contextlib
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

import psutil

from tests.support.hosts import Hosts
from tests.support.hosts import why_not as why_no_hosts
from tests.support.launched import LAUNCH
from tests.support.launcher import environment
from tests.support.paths import ROOT

PORT = 6379
START_SECONDS, TRIES = 120, 3  # of a node
STORE_BYTES = 80_000_000  # the least that Ray takes
WITHOUT = ("--include-dashboard=false", "--no-monitor")  # of the head
QUIET = ("--include-log-monitor=false", "--disable-usage-stats")


def why_not() -> str | None:
    """The reason why there can be none, or None."""
    return None if importlib.util.find_spec("ray") else "the package ray is not installed"


class RayCluster(contextlib.AbstractContextManager):
    """Two nodes of a CPU each, for as long as the `with` lasts."""

    def __init__(self) -> None:
        self.hosts, self.folder = Hosts(), tempfile.TemporaryDirectory(prefix="ray")

    def __enter__(self):
        self.hosts.__enter__()
        self.address = f"{self.hosts.addresses[0]}:{PORT}"
        head = ("--head", f"--port={PORT}", f"--temp-dir={self.folder.name}", *WITHOUT)
        try:
            for host, flags in enumerate((head, (f"--address={self.address}",))):
                self._start(host, *flags)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.__exit__()  # kills what runs there
        self.folder.cleanup()

    def _start(self, host: int, *flags: str) -> None:
        """A node on a host. Ray gives it up after 30 seconds, which are few on a busy machine, so there are more tries.

        Its output goes to a file, for what it leaves behind would keep a pipe open.
        """
        sizes = ("--num-cpus=1", f"--object-store-memory={STORE_BYTES}")
        address = f"--node-ip-address={self.hosts.addresses[host]}"
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", *flags, address, *sizes, *QUIET]
        output = pathlib.Path(self.hosts.directory, f"ray{host}")
        for _ in range(TRIES):
            with output.open("w") as file:
                settings = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "timeout": START_SECONDS}
                done = subprocess.run(self.hosts.inside(host, *words), env=environment(), cwd=ROOT, **settings)
            if done.returncode == 0:
                return
            for process in self.hosts.processes(host):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        raise AssertionError(output.read_text())

    def env(self) -> dict[str, str]:
        """The environment of what runs on the cluster."""
        return {**environment(), "RAY_ADDRESS": self.address}

    def launch(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess:
        """`ckdist launch --on ray words...` on the first host, to its end."""
        command = self.hosts.inside(0, *LAUNCH, "--on", "ray", *words)
        return subprocess.run(command, env=self.env(), capture_output=True, text=True, timeout=timeout, cwd=ROOT)


__all__ = ["RayCluster", "why_no_hosts", "why_not"]
