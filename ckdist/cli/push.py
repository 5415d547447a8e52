"""`ckdist push ADAPTER URL --name NAME`: loads an adapter into a running server, which reads it from its --lora-dir."""

import json
import os
import pathlib
import shutil
import tempfile

from ckdist.cli.server_call import call
from ckdist.config.tuning_commands import PushCommand
from ckdist.errors import ConfigError, RequestError

SECONDS = 600.0  # longest time of a load on all ranks
FILES = ("adapter_config.json", "adapter_model.safetensors")


def run(command: PushCommand) -> int:
    """Copies the adapter if asked, and sends its place to the server. Returns 0."""
    adapter = pathlib.Path(str(command.adapter)).absolute()
    is_gguf = adapter.is_file() and adapter.suffix == ".gguf"
    if not is_gguf and not all((adapter / file).is_file() for file in FILES):
        raise ConfigError(
            f"{adapter} is no adapter: give a GGUF, or the folder of {' and '.join(FILES)} (OUTPUT/adapter)"
        )
    path = str(adapter)
    if command.copy_to is not None:
        path = command.name + (".gguf" if is_gguf else "")
        _copy(adapter, pathlib.Path(command.copy_to), path, command.replace)
    key = command.api_key or os.environ.get("CKDIST_API_KEY", "")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    body = json.dumps({"lora_name": command.name, "lora_path": path, "load_inplace": command.replace})
    try:
        connection, response = call(command.url, "POST", "/load_lora_adapter", headers, SECONDS, body)
    except RequestError as error:
        outside = "within --lora-dir" in str(error) and command.copy_to is None
        remedy = "; --copy-to DIR copies the adapter there, if this host sees the server's folder" if outside else ""
        raise RequestError(f"{error}{remedy}") from None
    response.read()
    connection.close()
    print(f"{command.url} has the adapter {command.name}")
    return 0


def _copy(adapter: pathlib.Path, folder: pathlib.Path, name: str, replace: bool) -> None:
    """Copies an adapter to folder/name. Raises ConfigError if it cannot, or if that exists without `replace`."""
    target = folder / name
    if target.exists() and not replace:
        raise ConfigError(f"{target} exists: give --replace, or another --name")
    try:
        with tempfile.TemporaryDirectory(prefix=".push-", dir=folder) as temporary:
            fresh, old = pathlib.Path(temporary) / "new", pathlib.Path(temporary) / "old"
            if adapter.is_file():
                shutil.copyfile(adapter, fresh)
            else:
                fresh.mkdir()
                for file in FILES:
                    shutil.copyfile(adapter / file, fresh / file)
            if target.exists():
                target.rename(old)
            fresh.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot copy {adapter} to {target}: {error.strerror or error}") from None
