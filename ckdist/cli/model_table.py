"""The models of `ckdist serve --models FILE or FOLDER`, or of several -m: their names and their settings."""

import pathlib
import re
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from ckdist.config.engine_config import EngineConfig
from ckdist.config.given_elsewhere import from_table, read_toml
from ckdist.config.request_defaults import RequestDefaultFlags
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError
from ckdist.hub.bundled import BUNDLED
from ckdist.serve.process import absolute

MAX_MODELS = 1000
NAME = re.compile(r"[^\s\x00-\x1f\x7f]{1,200}")
# Settings of a model's job, and those that the HTTP process applies to its requests. All others are the server's.
ENGINE = {item.name for item in fields(EngineConfig)} - {"model", "hf_repo", "config"}
OF_JOB = (*sorted(ENGINE), "max_step_ms", "max_queue", "pooling")
OF_REQUESTS = (
    "alias",
    "prefill_file",
    "slot_save_path",
    "keep_alive",
    *(item.name for item in fields(RequestDefaultFlags)),
)
FIELDS = {item.name: item for item in fields(ServeConfig)}


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model of the table. `config.model` is its path."""

    name: str
    config: ServeConfig
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    at_start: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The flags of its job, without --model."""
        words = ["--alias", self.name]
        for name in OF_JOB:
            item, value = FIELDS[name], getattr(self.config, name)
            flag = item.metadata["flags"][-1]
            if value == item.default or value is None:
                continue
            if isinstance(value, bool):
                words.append(flag)
                continue
            values: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
            words += [f"{flag}={one}" for one in values]
        return tuple(words)


def base_of(config: ServeConfig) -> ServeConfig:
    """The settings of a model that has none of its own."""
    own = {"further_model": (), "models": None, "models_max": None, "allow_model_changes": False}
    return replace(config, model=None, config=None, lora_dir=None, lora_uploads=0, **own)


def read_table(config: ServeConfig) -> list[ModelEntry]:
    """Returns the models that `config` names. Raises ConfigError if a setting or a name is wrong."""
    base = base_of(config)
    given = ((config.model,) if config.model is not None else ()) + config.further_model
    names = [_stem(model) for model in given]
    if config.models is not None and config.alias is not None:
        raise ConfigError(
            f"--alias {config.alias} is the name of one -m: models of --models have `name` in its TOML file"
        )
    if config.models is None and not given:
        given, names = (str(BUNDLED),), ["ckdist-bundled"]
    entries = [
        ModelEntry(name=config.alias or name, config=replace(base, model=model), at_start=True)
        for model, name in zip(given, names, strict=True)
    ]
    if config.models is not None:
        path = pathlib.Path(config.models)
        entries += _folder(path, base) if path.is_dir() else _file(path, base)
    if not entries:
        raise ConfigError(f"--models ({config.models}) names no model: give a TOML file with [[model]], or a folder")
    if len(entries) > MAX_MODELS:
        raise ConfigError(f"--models ({config.models}) names {len(entries)} models, more than {MAX_MODELS}")
    _check_names(entries)
    _check_files(entries)
    return entries


def _stem(model: str) -> str:
    return pathlib.Path(model.partition("?")[0]).stem if pathlib.Path(model).exists() else model.removeprefix("hf:")


def _folder(folder: pathlib.Path, base: ServeConfig) -> list[ModelEntry]:
    """Each GGUF file is a model, and each folder with safetensors or one GGUF file. They load on demand."""
    paths = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            parts = sorted(path.glob("*.gguf"))
            paths += [path] if (path / "config.json").exists() else parts[:1]
        elif path.suffix == ".gguf" and not re.search(r"-0000[2-9]-of-|-000[1-9]\d-of-", path.name):
            paths.append(path)
    names = [path.name if path.is_dir() else re.sub(r"-00001-of-\d{5}$", "", path.stem) for path in paths]
    return [
        ModelEntry(name=name, config=replace(base, model=str(path))) for name, path in zip(names, paths, strict=True)
    ]


def _file(path: pathlib.Path, base: ServeConfig) -> list[ModelEntry]:
    table = read_toml(str(path))
    models: Any = table.pop("model", [])
    if table or not isinstance(models, list) or not all(isinstance(one, dict) for one in cast("list[Any]", models)):
        raise ConfigError(f"{path} must have one table [[model]] per model, and nothing else")
    found = cast("list[dict[str, Any]]", models)
    return [_entry(one, path.parent, f"{path}, model {number}", base) for number, one in enumerate(found, 1)]


def _entry(table: dict[str, Any], folder: pathlib.Path, where: str, base: ServeConfig) -> ModelEntry:
    path = _text(table.pop("path", None), f"{where}: path")
    relative = folder / path
    model = str(relative) if relative.exists() else path
    if relative.is_dir() and not ((relative / "config.json").exists() or any(relative.glob("*.gguf"))):
        raise ConfigError(f"{where}: path ({model}) is a folder without a model: it needs config.json or a GGUF file")
    given = {key: table.pop(key) for key in ("name", "alias") if key in table}
    if len(given) > 1:
        raise ConfigError(f"{where}: name and alias are the same setting: leave one out")
    name = _text(next(iter(given.values()), _stem(model)), f"{where}: name")
    aliases, pinned, load = table.pop("aliases", []), table.pop("pinned", False), table.pop("load", None)
    if not isinstance(aliases, list):
        raise ConfigError(f"{where}: aliases must be a list of names")
    if not isinstance(pinned, bool):
        raise ConfigError(f"{where}: pinned must be true or false")
    if load not in (None, "start", "demand"):
        raise ConfigError(f"{where}: load must be start or demand, not {load!r:.40}")
    own = from_table(ServeConfig, table, where)
    for key in own:
        if key not in OF_JOB and key not in OF_REQUESTS:
            raise ConfigError(f"{where}: {key} is a setting of the whole server: give it as a flag")
    try:
        config = replace(base, model=model, **own)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    names = tuple(_text(alias, f"{where}: aliases") for alias in cast("list[Any]", aliases))
    at_start = load == "start" or (load is None and pinned)
    return ModelEntry(name=name, config=config, aliases=names, pinned=pinned, at_start=at_start)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be a text")
    return value


def _check_names(entries: list[ModelEntry]) -> None:
    names: dict[str, ModelEntry] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            if not NAME.fullmatch(name):
                raise ConfigError(f"{name!r:.80} is no name of a model: use 1 to 200 characters without spaces")
            if (other := names.setdefault(name, entry)) is not entry:
                raise ConfigError(
                    f"two models have the name {name!r} ({other.config.model} and {entry.config.model}): "
                    "give each its own, as [[model]] in --models FILE"
                )
    for entry in entries:
        if same := names.keys() & entry.config.named_adapters:
            raise ConfigError(f"a model and an adapter of {entry.name} have the name {min(same)!r}: give each its own")


def _check_files(entries: list[ModelEntry]) -> None:
    """Raises ConfigError if two models write into the same place."""
    for name in ("trace", "slot_save_path"):
        places: dict[str, ModelEntry] = {}
        for entry in entries:
            place = absolute(getattr(entry.config, name))
            if place is not None and (other := places.setdefault(place, entry)) is not entry:
                raise ConfigError(
                    f"the models {other.name!r} and {entry.name!r} have the same {name} ({place}): "
                    "give each its own, as [[model]] in --models FILE"
                )
