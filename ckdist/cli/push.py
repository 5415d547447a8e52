"""`ckdist push ADAPTER URL --name NAME`: loads an adapter into a running server."""

import json
import os
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator

from ckdist.cli.server_call import body_of, call
from ckdist.config.tuning_commands import PushCommand
from ckdist.errors import ConfigError, RequestError

SECONDS = 600.0  # longest time of a load on all ranks
FILES = ("adapter_config.json", "adapter_model.safetensors")


def run(command: PushCommand) -> int:
    """Uploads the adapter, or copies it and sends its place to the server. Returns 0."""
    adapter = pathlib.Path(str(command.adapter)).absolute()
    is_gguf = adapter.is_file() and adapter.suffix == ".gguf"
    if not is_gguf and not all((adapter / file).is_file() for file in FILES):
        raise ConfigError(
            f"{adapter} is no adapter: give a GGUF, or the folder of {' and '.join(FILES)} (OUTPUT/adapter)"
        )
    key = command.api_key or os.environ.get("CKDIST_API_KEY", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if command.copy_to is None:
        files = {"adapter.gguf": adapter} if is_gguf else {file: adapter / file for file in FILES}
        _upload(command, headers, files)
    else:
        path = command.name + (".gguf" if is_gguf else "")
        _copy(adapter, pathlib.Path(command.copy_to), path, command.replace)
        body = {"lora_name": command.name, "lora_path": path, "load_inplace": command.replace}
        _send(command.url, "/load_lora_adapter", {**headers, "Content-Type": "application/json"}, json.dumps(body))
    print(f"{command.url} has the adapter {command.name}")
    return 0


def _upload(command: PushCommand, headers: dict[str, str], files: dict[str, pathlib.Path]) -> None:
    """Sends the files as one form. Raises RequestError if the server refuses them."""
    try:
        _send(command.url, "/lora_uploads", headers)  # it may refuse the key, before the files are sent
    except RequestError as error:
        raise RequestError(f"{error}; or copy the adapter with --copy-to DIR, if this host sees its folder") from None
    mark = f"--{secrets.token_hex(16)}"
    heads = {
        name: f'{mark}\r\nContent-Disposition: form-data; name="{name}"; filename="{name}"\r\n\r\n'.encode()
        for name in files
    }
    end = f"{mark}--\r\n".encode()
    length = sum(len(heads[name]) + path.stat().st_size + 2 for name, path in files.items()) + len(end)

    def parts() -> Iterator[bytes]:
        """The form's bytes."""
        for name, path in files.items():
            yield heads[name]
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    yield piece
            yield b"\r\n"
        yield end

    kind = {"Content-Type": f"multipart/form-data; boundary={mark[2:]}", "Content-Length": str(length)}
    replaces = "?load_inplace=true" if command.replace else ""
    _send(command.url, f"/lora_uploads/{command.name}{replaces}", {**headers, **kind}, parts())


def _send(url: str, path: str, headers: dict[str, str], body: str | Iterable[bytes] | None = None) -> None:
    body_of(url, *call(url, "GET" if body is None else "POST", path, headers, SECONDS, body))


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
