"""`ckdist pull NAME`: fetches a model, verifies it, and prints where it is."""

import os
import pathlib

from ckdist.config import PullCommand
from ckdist.errors import ConfigError
from ckdist.hub.resolve import find, known_names


def run(command: PullCommand) -> int:
    if command.name is None:
        raise ConfigError(f"which model? ckdist pull NAME, one of {known_names()}")
    path = pathlib.Path(find(command.name, command.accept_license, progress=True))
    size = (
        sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        if path.is_dir()
        else os.path.getsize(path)
    )
    print(f"{command.name}: {path}, {size / 1e6:.1f} MB")
    return 0
