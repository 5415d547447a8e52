"""A short text of the bundled model: the command that generates it, and its tokens as one process has them."""

import functools
import json

from tests.support.launcher import run_ranks

GENERATE = ("generate", "-p", "def main(", "-n", "12", "--temp", "0", "-t", "1", "--json")


@functools.cache
def tokens_of_one_process() -> list[int]:
    """What every job's GENERATE must give; computed once for all tests of a worker."""
    done = run_ranks(1, "-m", "ckdist.cli.main", *GENERATE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["token_ids"]
