"""Prompts that are computed ahead: /v1/cache/prefill, and llama-server's /slots/{id}?action=save, restore and erase."""

import time
from typing import Any

from ckdist.engine.sampling_params import SamplingParams
from ckdist.serve.answer import json_answer
from ckdist.serve.body import read_body
from ckdist.serve.paths.path import Path, Request, Response, Service
from ckdist.serve.problems import Problem
from ckdist.serve.requests.json_body import parse_object
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.text_records import Prepared

ACTIONS = ("save", "restore", "erase")


async def prefill(service: Service, request: Request) -> Response:
    """Computes the prompt of a later chat or completion and keeps it in the cache. The body is that request's."""
    work, account = await service.prepare("prefill", request), request.scope["ckdist.account"]
    return json_answer(await service.prefill(work, account, request))


async def act(service: Service, request: Request) -> Response:
    """Saves, restores or erases the tokens of a slot. The body names the file: `{"filename": "a.bin"}`."""
    service.check_ready()
    if service.slots is None:
        raise Problem(501, "slots are not saved: start the server with --slot-save-path DIR", code="not_supported")
    action, number = request.query_params.get("action", ""), request.path_params["slot"]
    if action not in ACTIONS:
        raise Problem(400, f"action ({action[:32]!r}) must be one of {', '.join(ACTIONS)}", "action", "invalid_value")
    slot = int(number) if number.isascii() and number.isdigit() and len(number) < 8 else -1
    service.slots.check(slot, number)
    account = request.scope["ckdist.account"]
    if action == "erase":
        return json_answer({"id_slot": slot, "n_erased": service.slots.erase(account, slot)})
    name = Fields(parse_object(await read_body(request, service.settings.max_body))).text("filename")
    if name is None:
        raise Problem(400, "filename is needed", "filename", "missing_required_parameter")
    begun = time.monotonic()
    timings = lambda: {f"{action}_ms": round(1e3 * (time.monotonic() - begun), 3)}
    answer: dict[str, Any] = {"id_slot": slot, "filename": name}
    if action == "save":
        tokens, size = service.slots.save(account, slot, name)
        return json_answer({**answer, "n_saved": tokens, "n_written": size, "timings": timings()})
    kept, size = service.slots.read(account, slot, name, service.vocab_size, service.context_length)
    nothing = SamplingParams(max_tokens=0)
    work = Prepared(prompts=[kept.tokens], max_tokens=[0], sampling=nothing, cache_salt=kept.salt, slot=slot)
    found = await service.prefill(work, account, request)
    counts = {"n_restored": found["prompt_tokens"], "n_read": size, "n_computed": found["computed_tokens"]}
    return json_answer({**answer, **counts, "timings": timings()})


PATHS = (
    Path("/v1/cache/prefill", prefill, ("POST",)),
    Path("/slots/{slot:path}", act, ("POST",)),
)
