"""`ckdist pull NAME`: fetches and verifies a model, and prints its path."""

import pathlib

from ckdist.config.commands import PullCommand
from ckdist.errors import ConfigError
from ckdist.hub.resolve import find, known_names


def run(command: PullCommand) -> int:
    """Fetches the model if necessary, and prints its path. Returns 0. Raises ConfigError if no name is given."""
    if command.name is None:
        raise ConfigError(f"which model? ckdist pull NAME, one of {known_names()}")
    path = pathlib.Path(find(command.name, command.accept_license, progress=True))
    size = (
        sum(file.stat().st_size for file in path.iterdir() if file.is_file()) if path.is_dir() else path.stat().st_size
    )
    print(f"{command.name}: {path}, {size / 1e6:.1f} MB")
    return 0
