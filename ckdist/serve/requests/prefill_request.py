"""Prepares a body of /v1/cache/prefill: that of a later chat or completion, whose prompt is computed ahead."""

import itertools
from typing import Any

from msgspec import structs

from ckdist.engine.messages import pack_tokens, unpack_tokens
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import RequestError
from ckdist.serve.requests.chat_request import chat
from ckdist.serve.requests.completion_request import completion
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.text_records import ModelFacts, Prepared
from ckdist.tokens.tokenizer import Tokenizer

SYSTEM = ("system", "developer")
QUESTIONS = ("a", "1")  # two texts without a common beginning


def face_of(body: dict[str, Any]) -> str:
    """Returns the face whose fields the body has."""
    return "chat" if "messages" in body else "completion"


def prefill(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Returns the prompts of the later request, with no token to generate.

    A chat ends with its last message, without the beginning of an answer. Only system messages: it ends where the
    user's message would begin, since templates may refuse a chat without one, or write the tools into it.
    """
    facts.check_continues("prompts that are kept")
    if not Fields(body).switch("cache_prompt", True):
        raise RequestError("cache_prompt is false, so nothing would be kept; leave it out", "cache_prompt")
    if face_of(body) == "completion":
        work = completion(body, tokenizer, facts)
    elif _is_system_alone(body["messages"]):
        work, other = (chat(_with_question(body, text), tokenizer, facts) for text in QUESTIONS)
        pairs = zip(unpack_tokens(work.prompts[0]), unpack_tokens(other.prompts[0]), strict=False)
        shared = [token for token, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if not shared:
            raise RequestError("the chat template writes nothing before the user's message; add one", "messages")
        work = structs.replace(work, prompts=[pack_tokens(shared)])
    else:
        work = chat({"add_generation_prompt": False, **body}, tokenizer, facts)
    nothing, rooms = SamplingParams(max_tokens=0), [0] * len(work.prompts)
    return Prepared(prompts=work.prompts, max_tokens=rooms, sampling=nothing, cache_salt=work.cache_salt)


def _is_system_alone(messages: Any) -> bool:
    is_list = isinstance(messages, list) and bool(messages)
    return is_list and all(isinstance(message, dict) and message.get("role") in SYSTEM for message in messages)


def _with_question(body: dict[str, Any], text: str) -> dict[str, Any]:
    return {**body, "messages": [*body["messages"], {"role": "user", "content": text}]}
