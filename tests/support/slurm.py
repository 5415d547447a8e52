"""A Slurm of one node in this machine: its daemons in a folder, on ports of their own. For root."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time

from tests.support.ports import free_port, worker

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
FirstJobId={first_job}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES OverSubscribe=YES State=UP
"""


def why_not() -> str | None:
    """The reason why this machine cannot have it, or None."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    return f"{', '.join(missing)} not installed" if missing else None


class Slurm(contextlib.AbstractContextManager):
    """The daemons for as long as the `with` lasts. `environment` is that of its commands."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.daemons = folder, []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] += os.pathsep + "/usr/sbin"

    def __enter__(self):
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        values = {"host": host, "folder": self.folder, "controller": free_port(), "daemon": free_port()}
        values["first_job"] = 1 + 50 * worker()  # ranks meet at a port made of the job's number
        (self.folder / "slurm.conf").write_text(CONFIG.format(cpus=os.cpu_count(), **values))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        flags = [f"--{name}={self.folder / file}" for name, file in files.items()]
        try:
            self.start("munged", "--foreground", "--force", f"--log-file={self.folder}/munge.log", *flags)
            self.wait((self.folder / "munge.socket").exists)
            self.start("slurmctld", "-D")
            self.start("slurmd", "-D", "-N", host)
            self.wait(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T").stdout)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.out").open("w") as out:
            self.daemons.append(subprocess.Popen(words, env=self.environment, stdout=out, stderr=out))

    def run(self, *words: str, timeout: float = 100, **more) -> subprocess.CompletedProcess:
        env = {**self.environment, **more.pop("env", {})}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=timeout, **more)

    def wait(self, condition) -> None:
        end = time.monotonic() + 30
        while not condition():
            logs = "\n".join(path.read_text()[-500:] for path in sorted(self.folder.glob("*.[lo]*")) if path.is_file())
            assert time.monotonic() < end, logs
            time.sleep(0.1)

    def __exit__(self, *exception) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
