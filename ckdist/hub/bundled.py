"""The model that comes with the package."""

import pathlib

BUNDLED = pathlib.Path(__file__).parent.parent / "models" / "bundled"
