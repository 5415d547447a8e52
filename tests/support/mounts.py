"""Processes that see other files at a path than the rest of the machine: mount namespaces, for root alone."""

import pathlib
import shlex
import subprocess
from collections.abc import Mapping


def why_no_mounts() -> str:
    """Why there are none here; empty where there are."""
    words = ["unshare", "--mount", "true"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stderr.strip()
    except OSError as error:
        return str(error)


def mounted(places: Mapping[pathlib.Path, pathlib.Path], command: str) -> str:
    """The words of a command that sees the second folder of each pair at the path of the first."""
    binds = [f"mount --bind {shlex.quote(str(there))} {shlex.quote(str(place))}" for place, there in places.items()]
    return f"unshare --mount bash -c {shlex.quote(' && '.join([*binds, f'exec {command}']))}"
