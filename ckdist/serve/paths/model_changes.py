"""Ollama's paths that change the models of a server: copy, delete and pull."""

import asyncio
import contextlib
import pathlib
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ckdist.errors import CkdistError
from ckdist.python_words import module_words
from ckdist.serve.accounts import Account
from ckdist.serve.answer import json_answer
from ckdist.serve.body import read_body
from ckdist.serve.encoding import to_json
from ckdist.serve.model_router import ModelRouter
from ckdist.serve.problems import Problem
from ckdist.serve.requests.adapter_choice import OLLAMA_TAG
from ckdist.serve.requests.json_body import parse_object
from ckdist.serve.requests.request_fields import Fields

FLAG = "--allow-model-changes"
MAX_BODY = 1 << 16
NAME = re.compile(r"\w[\w.-]*(?:[/:]\w[\w.-]*)*", re.ASCII)
MAX_NAME = 200
HUBS = ("hf.co/", "huggingface.co/", "hf:")
KILL_SECONDS = 5.0


async def copy(router: ModelRouter, request: Request) -> Response:
    """Gives a model a further name: {"source", "destination"}. It lasts until the server ends."""
    fields = await _fields(router, request)
    source, name = _name(fields, "source"), _name(fields, "destination")
    model = router.find(source)
    if model.adapter(source) is not None:
        raise Problem(400, f"{source!r} is an adapter of {model.name!r}: copy the model", "source", "invalid_value")
    router.add_copy(model, name)
    return Response()


async def delete(router: ModelRouter, request: Request) -> Response:
    """Removes a copy, or a model that a client has pulled. Its files go if the pull has fetched them."""
    fields = await _fields(router, request)
    fetched = await router.remove(_name(fields, "model", "name"))
    if fetched is not None:
        from ckdist.hub.remove import remove_fetched

        try:
            await asyncio.to_thread(remove_fetched, pathlib.Path(fetched))
        except (CkdistError, OSError) as error:
            raise Problem(500, f"the model is no longer served, and its files remain: {error}") from None
    return Response()


async def pull(router: ModelRouter, request: Request) -> Response:
    """Fetches a model as `ckdist pull` does, and serves it. A model that the server has is a success at once."""
    fields = Fields(parse_object(await read_body(request, MAX_BODY) or b"{}"))
    name, streams = _name(fields, "model", "name"), fields.value("stream", bool) is not False
    with contextlib.suppress(Problem):
        router.find(name)
        lines = _known()
        return await _answer(lines, streams)
    check_allowed(router, request)
    if router.settings.pulled is None:
        raise Problem(403, "no key had models = true when the server started: start it again", code="not_allowed")
    return await _answer(_pulled(router, name, _source(name)), streams)


async def _known() -> AsyncIterator[dict[str, Any]]:
    yield {"status": "success"}


async def _answer(lines: AsyncIterator[dict[str, Any]], streams: bool) -> Response:
    if streams:

        async def encoded() -> AsyncIterator[bytes]:
            """Yields a line of JSON each. An error is the last one."""
            try:
                async for line in lines:
                    yield to_json(line) + b"\n"
            except Problem as problem:
                yield to_json({"error": str(problem)}) + b"\n"

        return StreamingResponse(encoded(), media_type="application/x-ndjson")
    last: dict[str, Any] = {}
    async for line in lines:
        last = line
    return json_answer(last)


async def _pulled(router: ModelRouter, name: str, source: str) -> AsyncIterator[dict[str, Any]]:
    """Yields Ollama's lines. Raises Problem if the model cannot be fetched. The fetch ends with its client."""
    yield {"status": "pulling manifest"}
    async with router.pulling:
        process = await asyncio.create_subprocess_exec(
            *module_words("ckdist.hub.pull_lines", source),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None, "a pipe"
        end: dict[str, Any] = {"error": "the process that fetches it has ended"}
        try:
            async for data in process.stdout:
                line = msgspec.json.decode(data, type=dict[str, Any])
                if "what" not in line:
                    end = line
                    continue
                what, total = line["what"], line["total"]
                yield {"status": f"pulling {name}", "digest": what, "total": total, "completed": line["completed"]}
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.wait_for(process.wait(), KILL_SECONDS)
        if "error" in end:
            raise Problem(400, f"{name!r} cannot be pulled: {end['error']}", "model")
        yield {"status": "verifying sha256 digest"}
        router.add_pulled(name, end["path"], end["is_new"])
        yield {"status": "success"}


def _source(name: str) -> str:
    """The name for `ckdist pull`. Raises Problem 404 if it is no name of a model: a path and a URL are none."""
    from ckdist.hub.catalogue import CATALOGUE

    if name in CATALOGUE:
        return name
    if hub := next((hub for hub in HUBS if name.startswith(hub)), None):
        return f"hf:{name.removeprefix(hub)}"
    known = ", ".join(CATALOGUE)
    message = f"there is no model {name!r} to pull: use {known}, or hf.co/owner/repo:quant"
    raise Problem(404, message, "model", "model_not_found")


async def _fields(router: ModelRouter, request: Request) -> Fields:
    check_allowed(router, request)
    return Fields(parse_object(await read_body(request, MAX_BODY) or b"{}"))


def check_allowed(router: ModelRouter, request: Request) -> None:
    """Raises Problem 403 if the client may not change models."""
    account: Account = request.scope["ckdist.account"]
    if not router.settings.allow_model_changes and not account.limits.models:
        message = f"clients may change models only with a key that has models = true, or if {FLAG} allows it to all"
        raise Problem(403, message, code="not_allowed")


def _name(fields: Fields, *names: str) -> str:
    name = fields.text(names, "").removesuffix(OLLAMA_TAG)
    if not NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise Problem(400, f"{names[0]} ({name[:100]!r}) is not the name of a model", names[0], "invalid_value")
    return name
