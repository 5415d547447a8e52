"""A virtual machine with two NUMA nodes that sees this host's files: one boot, then commands one after another.

QEMU in software emulation on Debian's stock kernel (prepare.sh), for what is right or wrong; nothing about speed can be
learnt in it. The guest reads the host's file system through an overlay, so it runs this very checkout in this very
environment; what it writes is gone with it.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
PARTS = pathlib.Path(os.environ.get("CKDIST_VM") or pathlib.Path.home() / ".cache" / "ckdist-vm")
BOOT_SECONDS = 120
COMMAND_SECONDS = 400  # most need 10 to 50, on a host that has nothing else to do
KERNEL_WORDS = "quiet panic=-1 mitigations=off no_timer_check"  # the timer is late on a busy host
LIFE_SECONDS = 3600  # QEMU ends by then whatever becomes of us
COVERED = [pathlib.Path(path) for path in ("/dev", "/proc", "/run", "/share", "/sys", "/tmp")]  # by the guest's own


def prepare() -> str:
    """Fetches kernel and packages where they are missing; the reason why there can be no machine here, or ""."""
    if os.uname().machine != "x86_64" or not shutil.which("apt-get"):
        return "the virtual machine is made for x86-64 Debian"
    if not (PARTS / "ready").exists() and os.geteuid():
        return "setting up the virtual machine installs packages: run `make test-vm` as root once"
    done = subprocess.run(
        [HERE / "prepare.sh"], env={**os.environ, "CKDIST_VM": str(PARTS)}, capture_output=True, text=True, timeout=900
    )
    return f"the virtual machine could not be set up: {done.stderr.strip()[-300:]}" if done.returncode else ""


def folders_to_keep() -> list[str]:
    """Folders of the host that the guest's own would cover, and that it needs: this checkout, Python and the kernel."""
    needed = {ROOT, pathlib.Path(sys.prefix), pathlib.Path(sys.base_prefix), PARTS}
    needed |= {path.resolve() for path in needed}
    return sorted(str(path) for path in needed if any(path.is_relative_to(own) for own in COVERED))


class Machine:
    """Two nodes of `cpus / 2` processors and `mib` MiB each; a context manager."""

    def __init__(self, cpus: int = 4, mib: int = 1536):
        self.share = pathlib.Path(tempfile.mkdtemp(prefix="ckdist-vm."))
        shutil.copy(HERE / "serve.sh", self.share)
        (self.share / "folders").write_text("".join(f"{folder}\n" for folder in folders_to_keep()))
        self.count = 0
        half = cpus // 2
        words = [
            "timeout",
            "-k",
            "5",
            str(LIFE_SECONDS),
            "qemu-system-x86_64",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max,la57=off",
            "-machine",
            "q35",
        ]
        words += [
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
            "-m",
            str(2 * mib),
            "-smp",
            f"{cpus},sockets=2,cores={half},threads=1",
        ]
        for node in (0, 1):
            words += ["-object", f"memory-backend-ram,id=memory{node},size={mib}M"]
            words += ["-numa", f"node,nodeid={node},cpus={node * half}-{(node + 1) * half - 1},memdev=memory{node}"]
        words += ["-numa", "dist,src=0,dst=1,val=21", "-numa", "dist,src=1,dst=0,val=21"]
        for name, path, more in (("host", "/", ",readonly=on,multidevs=remap"), ("share", self.share, "")):
            words += [
                "-fsdev",
                f"local,id={name},path={path},security_model=none{more}",
                "-device",
                f"virtio-9p-pci,fsdev={name},mount_tag={name}",
            ]
        words += [
            "-device",
            "virtio-rng-pci",
            "-serial",
            f"file:{self.share}/console",
            "-kernel",
            str(PARTS / "vmlinuz"),
            "-initrd",
            str(PARTS / "initrd.gz"),
        ]
        words += [
            "-append",
            f"console=ttyS0 {KERNEL_WORDS} rdinit=/init guest.modules={PARTS}/kernel/lib/modules",
        ]
        with open(self.share / "qemu", "wb") as said:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
        self._await("up", BOOT_SECONDS)

    def run(
        self, command: str, timeout: float = COMMAND_SECONDS, check: bool = True, **env: str
    ) -> subprocess.CompletedProcess:
        """A shell command in the guest, in this checkout and environment; AssertionError with its output when it
        fails.
        """
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        env = {
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **env,
        }
        lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
        lines += [f"cd {shlex.quote(str(ROOT))}", f"exec timeout -k 5 {timeout} bash -c {shlex.quote(command)}"]
        n, self.count = self.count, self.count + 1
        part = self.share / "part"
        part.write_text("\n".join(lines) + "\n")
        part.rename(self.share / f"{n}.command")
        self._await(f"{n}.code", timeout + 20)
        done = subprocess.CompletedProcess(
            command,
            int((self.share / f"{n}.code").read_text()),
            (self.share / f"{n}.output").read_text(errors="replace"),
        )
        assert not check or done.returncode == 0, (
            f"`{command}` ended with {done.returncode} in the guest:\n{done.stdout[-4000:]}"
        )
        return done

    def _await(self, name: str, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not (self.share / name).exists():
            if self.process.poll() is not None or time.monotonic() > end:
                said = [
                    (self.share / file).read_text(errors="replace")[-1500:]
                    for file in ("qemu", "console")
                    if (self.share / file).exists()
                ]
                self.stop()
                raise RuntimeError(
                    f"the virtual machine did not reach {name} within {timeout:.0f} s: " + " ".join(said)
                )
            time.sleep(0.05)

    def stop(self) -> None:
        (self.share / "stop").touch()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # passed on to QEMU by `timeout`
            self.process.wait(10)
        shutil.rmtree(self.share, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


if __name__ == "__main__":
    print(prepare() or "the virtual machine is set up")
