"""Jobs that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT start."""

import subprocess
import sys

from tests.support.launcher import one_host
from tests.support.paths import ROOT

CKDIST = (sys.executable, "-m", "ckdist.cli.main")
MPI = ("OMPI_", "PMI_", "PMIX_", "MPI_")


def secret(folder, text: str = "a secret of this job alone") -> str:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def start(rank: int, size: int, port: int, *words: str, **more: str) -> subprocess.Popen:
    """One rank of `ckdist words...`; `more` are variables of its environment."""
    env = {name: value for name, value in one_host().items() if not name.startswith(MPI)}
    env |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CKDIST_START_TIMEOUT": "60",
        **more,
    }
    return subprocess.Popen(
        [*CKDIST, *words],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def finish(ranks: list[subprocess.Popen], seconds: float = 70) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    try:
        texts = [rank.communicate(timeout=seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *text) for rank, text in zip(ranks, texts, strict=True)]
