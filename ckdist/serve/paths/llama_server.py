"""llama-server's settings and slots, and vLLM's facts about the tokenizer."""

from ckdist import __version__
from ckdist.engine.sampling_params import SamplingParams
from ckdist.serve.answer import LongAnswer, json_answer
from ckdist.serve.encoding import to_json
from ckdist.serve.llama_answer import llama_settings
from ckdist.serve.paths.path import Path, Request, Response, Service
from ckdist.serve.problems import Problem
from ckdist.serve.requests.sampling_fields import LLAMA_DEFAULTS


async def props(service: Service, request: Request) -> Response:
    """The server's settings. The model's name replaces its path, which stays private."""
    service.check_ready()
    name, given = service.settings.model_name, service.settings.defaults
    settings = llama_settings(SamplingParams(**LLAMA_DEFAULTS | given.sampling), given.max_tokens or -1)
    known = {
        "default_generation_settings": {"id": 0, "n_ctx": service.context_length, "params": settings},
        "total_slots": service.settings.parallel,
        "model_alias": name,
        "model_path": name,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"ckdist {__version__}",
        "is_sleeping": False,
    }
    return LongAnswer(await service.finished("tokenizer_facts", request, to_json(known)))


async def tokenizer_info(service: Service, request: Request) -> Response:
    """Facts about the tokenizer in vLLM's format, for clients without a tokenizer."""
    service.check_ready()
    known = {"model_max_length": service.context_length}
    return LongAnswer(await service.finished("tokenizer_facts", request, to_json(known)))


async def slots(service: Service, request: Request) -> Response:
    """One entry per sequence that may run at once. Clients are not shown. 503 if all are busy and the client sets
    fail_on_no_slot.
    """
    service.check_ready()
    most = service.settings.parallel
    busy = min(most, service.client.active)
    if request.query_params.get("fail_on_no_slot") and busy == most:
        raise Problem(503, f"all {most} slots are busy; try again later")
    context = service.context_length
    entries = [{"id": i, "n_ctx": context, "speculative": False, "is_processing": i < busy} for i in range(most)]
    return json_answer(entries)


PATHS = (
    Path("/props", props),
    Path("/tokenizer_info", tokenizer_info),
    Path("/slots", slots),
)
