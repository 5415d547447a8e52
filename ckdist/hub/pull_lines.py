"""`python -m ckdist.hub.pull_lines NAME`: fetches a model for a server, and prints its progress as lines of JSON."""

import json
import pathlib
import sys
import time

from ckdist.errors import CkdistError
from ckdist.hub.resolve import find
from ckdist.progress import ProgressBar

LEAST_SECONDS = 0.1  # between two lines


def pull(name: str) -> None:
    """Prints {"what", "completed", "total"} while it fetches, and {"path", "is_new"} or {"error"} at the end."""
    printed, begun = 0.0, time.time()

    def sink(what: str, completed: int, total: int) -> None:
        """Prints a line, but not too often."""
        nonlocal printed
        if time.monotonic() - printed >= LEAST_SECONDS or completed >= total:
            printed = time.monotonic()
            print(json.dumps({"what": what, "completed": completed, "total": total}), flush=True)

    ProgressBar.sink = staticmethod(sink)
    try:
        path = pathlib.Path(find(name, progress=True))
        files = list(path.iterdir()) if path.is_dir() else [path]
        is_new = any(file.stat().st_ctime >= begun for file in files)  # a rename into its place changes this time
        print(json.dumps({"path": str(path), "is_new": is_new}), flush=True)
    except (CkdistError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    pull(sys.argv[1])
