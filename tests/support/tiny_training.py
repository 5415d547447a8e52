"""A training that takes seconds: a small Llama from nothing on a made-up text, and its configuration."""

import functools
import os
import pathlib
import tempfile

from ckdist.train.config import TrainConfig

MODEL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def text(folder: pathlib.Path) -> str:
    """Many short documents, of which a model learns something at once."""
    for i in range(24):
        (folder / f"{i:02d}.txt").write_text(
            "".join(f"{a} and {b} are {a + b}.\n" for a in range(i, i + 6) for b in range(7))
        )
    return str(folder / "*.txt")


@functools.cache
def shared_text() -> str:
    """The same in a folder of this process. Tests do not change its files."""
    return text(pathlib.Path(tempfile.mkdtemp(prefix="text-", dir=os.environ.get("XDG_CACHE_HOME"))))


def config(folder: pathlib.Path, **fields) -> TrainConfig:
    """`folder`: of what is written."""
    common = {
        "output_dir": str(folder / "out"),
        "train_file": (shared_text(),),
        "model_config": MODEL,
        "max_length": 32,
        "per_device_train_batch_size": 6,
        "max_steps": 8,
    }
    common |= {
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "bf16": False,
        "threads": 1,
        "save_steps": 4,
        "logging_steps": 1,
        "weight_decay": 0.1,
    }
    return TrainConfig(**common | fields)


def toml(folder: pathlib.Path, **fields) -> pathlib.Path:
    """The same as a file."""
    c = config(folder, **fields)
    written = {
        name: value
        for name, value in c.as_dict().items()
        if value != TrainConfig.__dataclass_fields__[name].default and name != "model_config"
    }
    show = lambda value: (
        str(value).lower()
        if isinstance(value, bool)
        else repr(list(value))
        if isinstance(value, tuple)
        else repr(value)
    )
    lines = (
        [f"{name} = {show(value)}" for name, value in written.items()]
        + ["[model_config]"]
        + [f"{name} = {show(value)}" for name, value in c.model_config.items()]
    )
    path = folder / "config.toml"
    path.write_text("\n".join(lines) + "\n")
    return path
