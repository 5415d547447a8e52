"""A model family from outside ckdist: a Llama in which every second layer attends only to the last 64 tokens.

The package with this file names it in its pyproject.toml, and ckdist finds it if both are installed:

    [project.entry-points."ckdist.families"]
    striped = "new_family:FAMILY"

    python examples/new_family.py      # creates such a package and a model of the family, and runs it

A family defines the layers for a config.json, and the names of tensors in files. All else follows from the layers.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from dataclasses import replace

from ckdist.engine.load_model import BUNDLED
from ckdist.models.families import llama
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec

WINDOW = 64


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Returns the layers for a config.json: Llama's, with a window in every second one."""
    spec = llama.config(f, outer)
    mixers = [replace(layer.mixer, window=WINDOW if i % 2 else 0) for i, layer in enumerate(spec.layers)]
    layers = tuple(replace(layer, mixer=mixer) for layer, mixer in zip(spec.layers, mixers, strict=True))
    return replace(spec, family="striped", layers=layers)


NAMES = {"name": "striped", "gguf": "striped", "model_types": ("striped",), "architectures": ("StripedForCausalLM",)}
FAMILY = replace(llama.FAMILY, from_config=config, **NAMES)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        info = folder / "new_family-1.0.dist-info"  # the metadata of an installed package
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: new-family\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[ckdist.families]\nstriped = new_family:FAMILY\n")
        for file in BUNDLED.glob("*.*"):
            (folder / file.name).symlink_to(file)
        values = json.loads((BUNDLED / "config.json").read_text())
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(values | {"architectures": ["StripedForCausalLM"]}))
        path = os.pathsep.join([name, str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        words = [sys.executable, "-m", "ckdist.cli.main", "generate", "-m", name, "-p", "def main(", "--temp", "0"]
        subprocess.run([*words, "-n", "16"], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=120)


if __name__ == "__main__":
    main()
