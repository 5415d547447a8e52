"""Adapters that clients upload into the folder `uploads` of --lora-dir. `--lora-uploads` limits their bytes."""

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.requests import Request

from ckdist.errors import CkdistError
from ckdist.regular_file import sync
from ckdist.serve.problems import Problem
from ckdist.serve.service import Service
from ckdist.serve.upload_form import receive_form

FOLDER = "uploads"
PEFT, GGUF = {"adapter_config.json", "adapter_model.safetensors"}, {"adapter.gguf"}
MOST = 100  # adapters
SECONDS = 600.0
FORM_BYTES = 1 << 16  # of a form beside its files
PART = ".part-"  # start of the names of folders that are being received


def room_of(service: Service, request: Request) -> "UploadRoom":
    """Returns the folder of uploads. Raises Problem 403 if the client may not upload."""
    settings = service.settings
    if not settings.lora_uploads or settings.lora_dir is None:
        message = "adapters are uploaded only if the server was started with --lora-dir DIR --lora-uploads SIZE"
        raise Problem(403, message, code="not_allowed")
    if settings.api_key_file is not None and not request.scope["ckdist.account"].limits.models:
        message = "this key may not upload adapters: it needs models = true in the file of --api-key-file"
        raise Problem(403, message, code="not_allowed")
    return _room(settings.lora_dir, settings.lora_uploads)


@lru_cache
def _room(folder: str, most_bytes: int) -> "UploadRoom":
    return UploadRoom(Path(folder) / FOLDER, most_bytes)


class UploadRoom:
    """The folder of uploads. All models of a server share it. A crash leaves complete adapters only."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self._arriving = 0  # bytes that uploads under way may take

    def described(self, loaded: Collection[str]) -> dict[str, Any]:
        """Returns the answer to GET."""
        sizes = self._sizes()
        data = [{"id": name, "bytes": size, "loaded": name in loaded} for name, size in sorted(sizes.items())]
        return {"object": "list", "data": data, "bytes": sum(sizes.values()), "most_bytes": self.most_bytes}

    @contextlib.asynccontextmanager
    async def receive(self, request: Request, name: str, replaces: bool) -> AsyncIterator[str]:
        """Writes a form's files to a temporary folder, yields their path, and then moves them to their place.

        Raises:
            Problem: 4xx or 507 if the name is taken, the form is wrong or slow, or its files have no room.
        """
        target = self.folder / name
        size = self._admitted(request, name, replaces)
        part, old = (self.folder / f"{PART}{secrets.token_hex(8)}" for _ in range(2))
        self._arriving += size
        try:
            part.mkdir(mode=0o700, parents=True)
            places = {file: part / file for file in sorted(PEFT | GGUF)}
            try:
                files, _ = await asyncio.wait_for(receive_form(request, places, size), SECONDS)
            except asyncio.TimeoutError:
                raise Problem(408, f"the files did not arrive within {SECONDS:.0f} seconds") from None
            if files.keys() not in (PEFT, GGUF):
                raise Problem(400, f"the form must have {' and '.join(sorted(PEFT))}, or {''.join(GGUF)}, as files")
            for file in files:
                await asyncio.to_thread(sync, places[file])
            yield str(part if len(files) > 1 else part / "adapter.gguf")
            if replaces and target.exists():
                target.rename(old)
            part.rename(target)
        except CkdistError as error:
            problem = Problem.of(error)
            problem.message = problem.message.replace(str(part), name)
            raise problem from None
        except OSError as error:
            raise Problem(507, f"the adapter cannot be written to --lora-dir: {error.strerror}") from None
        finally:
            self._arriving -= size
            self._remove_parts(part, old)

    def remove(self, name: str, is_loaded: bool) -> None:
        """Removes an adapter's files. Raises Problem 404 if there are none, and it was not loaded either."""
        target = self.folder / name
        if not target.exists() and not is_loaded:
            raise Problem(404, f"there is no adapter {name!r}", "lora_name", "not_found")
        with contextlib.suppress(FileNotFoundError):
            target.rename(part := self.folder / f"{PART}{secrets.token_hex(8)}")
            self._remove_parts(part)

    def _admitted(self, request: Request, name: str, replaces: bool) -> int:
        """Returns the most bytes that an upload may take. Raises Problem if that is too little."""
        sizes = self._sizes()
        old = sizes.pop(name, None)
        if old is not None and not replaces:
            raise Problem(409, f"{name!r} was uploaded before: set load_inplace, or delete it first", "lora_name")
        if len(sizes) >= MOST:
            raise Problem(507, f"{len(sizes)} adapters were uploaded, of at most {MOST}: delete some")
        used = sum(sizes.values()) + self._arriving
        free = max(self.most_bytes - used, 0)
        disk = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
        length = request.headers.get("content-length", "")
        size = int(length[:18]) if length.isdigit() else min(free, disk)
        if size > free + FORM_BYTES or not free:
            message = f"uploads have or may get {used} bytes of at most {self.most_bytes} (--lora-uploads)"
            raise Problem(507, f"{message}, and {size} more do not fit: delete some")
        if size > disk:
            raise Problem(507, f"the disk of --lora-dir has {disk} bytes free, and the adapter may take {size}")
        return min(size, free)

    def _sizes(self) -> dict[str, int]:
        """Bytes of each complete adapter."""
        folders = self.folder.iterdir() if self.folder.is_dir() else ()
        return {
            folder.name: sum(file.stat().st_size for file in folder.iterdir())
            for folder in folders
            if not folder.name.startswith(PART) and folder.is_dir()
        }

    def _remove_parts(self, *own: Path) -> None:
        """Removes the folders `own`, and those that a crash has left."""
        for folder in self.folder.glob(f"{PART}*"):
            with contextlib.suppress(FileNotFoundError):
                if folder in own or folder.stat().st_mtime < time.time() - 2 * SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
