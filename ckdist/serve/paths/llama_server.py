"""llama-server's own API: completion, its settings, its slots, tokens and templates. vLLM shares /tokenize and /detokenize."""

from fastapi import Request
from fastapi.responses import Response

from ckdist import __version__
from ckdist.engine.sampling import SamplingParams
from ckdist.serve.answer import json_answer
from ckdist.serve.llama_completion import LlamaCompletionAnswer
from ckdist.serve.llama_settings import llama_settings
from ckdist.serve.paths.path import Path
from ckdist.serve.problems import Problem
from ckdist.serve.requests.llama_completion import SAMPLING_DEFAULTS
from ckdist.serve.service import Service

NO_END = b""  # llama-server's own streams end with the last event


async def completion(service: Service, request: Request) -> Response:
    prepared = await service.prepare("llama_completion", request)
    return await service.answer(request, prepared, LlamaCompletionAnswer, NO_END)


async def props(service: Service, request: Request) -> Response:
    """What the server was started with. The model's path stays private: its name stands there."""
    service.check_ready()
    tokenizer, name = service.tokenizer, service.settings.model_name
    template = tokenizer.chat_template
    settings = llama_settings(SamplingParams(**SAMPLING_DEFAULTS), -1)
    return json_answer(
        {
            "default_generation_settings": {"id": 0, "n_ctx": service.context_length, "params": settings},
            "total_slots": service.settings.parallel,
            "model_alias": name,
            "model_path": name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": template.sources["default"] if template is not None else "",
            "bos_token": "" if tokenizer.bos_token_id is None else tokenizer.token_text(tokenizer.bos_token_id),
            "eos_token": next((tokenizer.token_text(token) for token in sorted(tokenizer.eos_token_ids)), ""),
            "build_info": f"ckdist {__version__}",
            "is_sleeping": False,
        }
    )


async def slots(service: Service, request: Request) -> Response:
    """One entry for each sequence that may run at once; which client has which is not told. 503 where the client wants a free one."""
    service.check_ready()
    most = service.settings.parallel
    busy = min(most, service.client.active)
    if request.query_params.get("fail_on_no_slot") and busy == most:
        raise Problem(503, f"all {most} slots are busy; try again later")
    context = service.context_length
    entries = [{"id": i, "n_ctx": context, "speculative": False, "is_processing": i < busy} for i in range(most)]
    return json_answer(entries)


async def lora_adapters(service: Service, request: Request) -> Response:
    adapter = service.settings.adapter
    return json_answer([] if adapter is None else [{"id": 0, "path": adapter, "scale": 1.0}])


async def change_lora_adapters(service: Service, request: Request) -> Response:
    raise Problem(400, "the scale of an adapter is fixed while the server runs", "scale", "unsupported_parameter")


async def apply_template(service: Service, request: Request) -> Response:
    return json_answer(await service.prepare("apply_template", request))


async def tokenize(service: Service, request: Request) -> Response:
    return json_answer(await service.prepare("tokenize", request))


async def detokenize(service: Service, request: Request) -> Response:
    return json_answer(await service.prepare("detokenize", request))


PATHS = (
    Path("/completion", completion, ("POST",)),
    Path("/completions", completion, ("POST",)),
    Path("/props", props),
    Path("/slots", slots),
    Path("/lora-adapters", lora_adapters),
    Path("/lora-adapters", change_lora_adapters, ("POST",)),
    Path("/apply-template", apply_template, ("POST",)),
    Path("/tokenize", tokenize, ("POST",)),
    Path("/detokenize", detokenize, ("POST",)),
)
