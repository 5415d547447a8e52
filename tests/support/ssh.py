"""A host (network namespace) that `ssh` reaches from the other one: an sshd there, and the keys of both ends.

Agents that ssh starts are forks (`tests/support/stubs.py`). The variables that an interpreter reads at its start must
then be those of this process.
"""

import contextlib
import os
import pathlib
import shlex
import shutil
import subprocess

from tests.support import launcher
from tests.support.hosts import Hosts
from tests.support.launcher import environment
from tests.support.served import wait_for
from tests.support.warm_starts import at_start

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin"]))
PRIVILEGES = pathlib.Path("/run/sshd")  # where sshd locks itself up; a service that starts it makes the folder
SERVER = """\
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
SetEnv SHLVL=2 {variables}
ForceCommand eval "exec {stub} $SSH_ORIGINAL_COMMAND"
"""
CLIENT = """\
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known
StrictHostKeyChecking no
LogLevel ERROR
"""


def why_no_ssh() -> str | None:
    """The reason why there can be none, or None."""
    return None if SSHD and shutil.which("ssh") and shutil.which("ssh-keygen") else "there is no sshd and ssh"


class Ssh(contextlib.AbstractContextManager):
    """The second of `hosts`, as `ssh` reaches it with `environment()` for as long as the `with` lasts."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.folder = hosts, pathlib.Path(hosts.directory, "ssh")

    def __enter__(self):
        (self.folder / "bin").mkdir(parents=True)
        PRIVILEGES.mkdir(exist_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "key"], check=True)
        fields = {"address": self.hosts.addresses[1], "stub": shlex.join(launcher.STUB)}
        fields["variables"] = " ".join(f'"{name}={value}"' for name, value in at_start(os.environ).items())
        (self.folder / "server").write_text(SERVER.format(folder=self.folder, **fields))
        (self.folder / "client").write_text(CLIENT.format(folder=self.folder))
        ssh = self.folder / "bin/ssh"  # the person's own settings are left alone
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/client "$@"\n')
        ssh.chmod(0o755)
        with (self.folder / "log").open("w") as log:
            words = self.hosts.inside(1, SSHD, "-D", "-e", "-f", str(self.folder / "server"))
            self.daemon = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(lambda: "listening" in self.log())
        return self

    def __exit__(self, *exception: object) -> None:
        self.daemon.kill()
        self.daemon.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def environment(self) -> dict[str, str]:
        """Of what runs on the first host."""
        env = environment()
        return {**env, "PATH": f"{self.folder}/bin{os.pathsep}{env['PATH']}"}
