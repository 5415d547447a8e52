"""`python -m ckdist.launcher.ray_agent GROUP BUNDLE@ADDRESS COMMAND...`: runs a command on a node of a Ray cluster.

The command is a child of an actor in that bundle of the placement group. This process forwards its input and output.
When this process ends, Ray ends the actor, the command's input ends, and so the command ends.
"""

import importlib
import os
import subprocess
import sys
import threading
from typing import Any

from ckdist.errors import CkdistError
from ckdist.launcher.ray_nodes import connected

CHUNK = 1 << 16
PLACE_SECONDS = 25.0  # limit for the actor to start
END_SECONDS = 10.0  # limit for the command to end after its output has ended


class CommandActor:
    """Runs a command on the node of the actor. One `write` and one `read` may run at the same time."""

    def __init__(self, words: list[str]) -> None:
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def write(self, data: bytes) -> None:
        """Writes to the command's input; b"" ends it."""
        assert self._process.stdin is not None
        view = memoryview(data)
        try:
            while view:
                view = view[self._process.stdin.write(view) :]
            if not data:
                self._process.stdin.close()
        except BrokenPipeError:  # the command has ended, so its output ends too
            pass

    def read(self) -> bytes:
        """Waits for output of the command and returns it; b"": the output has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.read(CHUNK)

    def code(self) -> int:
        """Returns the exit code, 128 + number after a signal. Raises TimeoutExpired if the command still runs."""
        code = self._process.wait(END_SECONDS)
        return 128 - code if code < 0 else code


def run(ray: Any, group: str, host: str, words: list[str]) -> int:
    """Runs `words` on a host of the group. Returns the exit code."""
    bundle = int(host.split("@", maxsplit=1)[0])
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    placement = importlib.import_module("ray.util").get_placement_group(group)
    options = ray.remote(num_cpus=1, max_concurrency=2)(CommandActor).options(
        scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(placement, bundle)
    )
    actor = options.remote(words)
    ray.get(actor.__ray_ready__.remote(), timeout=PLACE_SECONDS)

    def forward() -> None:
        """Forwards this process's input until it ends."""
        data = b" "
        while data:
            data = os.read(0, CHUNK)
            ray.get(actor.write.remote(data))

    threading.Thread(target=forward, daemon=True).start()
    while data := ray.get(actor.read.remote()):
        while data:
            data = data[os.write(1, data) :]
    return ray.get(actor.code.remote(), timeout=2 * END_SECONDS)


def main(words: list[str]) -> int:
    """Runs the command. A failure of Ray is one line on standard error."""
    group, host, *command = words
    try:
        ray = connected()
        return run(ray, group, host, command)
    except CkdistError as error:
        sys.stderr.write(f"{error}\n")
    except Exception as error:  # Ray's errors have no base class outside Ray
        sys.stderr.write(f"Ray, {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
