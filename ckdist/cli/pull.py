"""`ckdist pull NAME`: fetches a model, verifies it, and prints where it is."""

import pathlib

from ckdist.config.commands import PullCommand
from ckdist.errors import ConfigError
from ckdist.hub.resolve import find, known_names


def run(command: PullCommand) -> int:
    """Prints where the model is, which is fetched if need be; 0. ConfigError without a name."""
    if command.name is None:
        raise ConfigError(f"which model? ckdist pull NAME, one of {known_names()}")
    path = pathlib.Path(find(command.name, command.accept_license, progress=True))
    size = (
        sum(file.stat().st_size for file in path.iterdir() if file.is_file()) if path.is_dir() else path.stat().st_size
    )
    print(f"{command.name}: {path}, {size / 1e6:.1f} MB")
    return 0
