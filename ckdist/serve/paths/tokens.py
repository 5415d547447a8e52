"""Converts text to tokens and back, and chats to text.

llama-server and vLLM share these paths, which need no engine.
"""

from ckdist.serve.answer import LongAnswer
from ckdist.serve.encoding import to_json
from ckdist.serve.paths.path import Path, Request, Response, Service


async def tokenize(service: Service, request: Request) -> Response:
    """The token ids of a text or a chat."""
    return LongAnswer(await service.finished("tokenize", request))


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids."""
    return LongAnswer(await service.finished("detokenize", request))


async def apply_template(service: Service, request: Request) -> Response:
    """The text of a chat, as the model would continue it."""
    return LongAnswer(await service.finished("apply_template", request))


async def tokenizer_info(service: Service, request: Request) -> Response:
    """Facts about the tokenizer in vLLM's format, for clients without a tokenizer."""
    service.check_ready()
    known = {"model_max_length": service.context_length}
    return LongAnswer(await service.finished("tokenizer_facts", request, to_json(known)))


PATHS = (
    Path("/tokenize", tokenize, ("POST",)),
    Path("/detokenize", detokenize, ("POST",)),
    Path("/apply-template", apply_template, ("POST",)),
    Path("/tokenizer_info", tokenizer_info),
)
