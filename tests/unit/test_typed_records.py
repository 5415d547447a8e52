"""Records between processes: what comes back, and which bytes are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack, structs

from ckdist.engine.messages import (
    FROM_RANK_0,
    TO_RANK_0,
    Embed,
    Failure,
    PromptScores,
    Status,
    Submit,
    Tokens,
    encode,
    read,
)
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import EngineError, RequestError
from ckdist.serve.api_keys import ApiKey, KeyLimits
from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.settings import HttpSettings
from ckdist.serve.text_records import EmbeddingWork, Prepared, Refusal, read_answer
from ckdist.tokens.tool_format import ToolFormat
from ckdist.tokens.worker_frames import packed

SAMPLING = SamplingParams(3, temperature=1, samplers=("top_k",), logit_bias={7: -1.5}, seed=1 << 63, grammar="g")
MESSAGES = [
    Submit("a", bytes(8), SAMPLING, None),
    Embed("a", bytes(4), "mean", 1, b"t"),
    Tokens("a", [5], "stop", 1, 2, 3, [[-0.5, [[5, -0.5]]]], PromptScores.pack([None, [-1.0, [[2, -1.0]]]]), 5),
    Tokens("a", []),
    Failure(None, "wrong", "id", 400),
]
PREPARED = Prepared(
    prompts=[bytes(4)], max_tokens=[3], sampling=SAMPLING, n=2, stops=("x",), stream=True, include_usage=False,
    answer=AnswerForm(("<t>", "</t>"), calls=ToolFormat("json"), types={"f": {"x": "string"}}, markers=(1, 2)),
    echoed={"metadata": {"k": [1, None]}},
)  # fmt: skip
ANSWERED = [PREPARED, EmbeddingWork([bytes(4)], first_texts=(1,)), Refusal(400, "no", details={"n_ctx": 4})]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_and_defaults_are_left_out(message):
    data = encode(message)
    assert read(data, TO_RANK_0 if isinstance(message, Submit | Embed) else FROM_RANK_0) == message
    defaults = {item.name for item in structs.fields(message) if getattr(message, item.name) == item.default}
    assert not defaults & {*msgpack.decode(data)}


def test_scalars_of_numpy_are_numbers():
    stats = {"a": np.float64(0.5), "b": np.int64(3), "c": 3}
    assert repr(read(encode(Status("ready", stats=stats)), FROM_RANK_0).stats) == "{'a': 0.5, 'b': 3, 'c': 3}"


@pytest.mark.parametrize("answer", ANSWERED, ids=lambda answer: type(answer).__name__)
def test_a_workers_answer_comes_back(answer):
    assert read_answer(packed(answer)) == answer


def test_settings_of_the_http_process_come_back():
    keys = (ApiKey("ann", "k", KeyLimits(max_running=2)),)
    given = HttpSettings(
        endpoint="e", model="m", model_name="n", listener=3, parent=1, api_keys=keys, overrides={"a.b": 1.5}
    )
    assert HttpSettings.from_json(given.to_json()) == given


WRONG = [  # changes of a good message, part of the error, its field
    ({"id": ""}, "id must be a string of length >= 1", "id"),
    ({"prompt": bytes(3)}, "prompt must be token ids as int32 bytes", "prompt"),
    ({"tenant": bytes(65)}, "tenant must be bytes of length <= 64", "tenant"),
    ({"sampling": []}, "sampling must be a map, got `array`", "sampling"),
    ({"sampling": {"top_k": True}}, "top_k must be an integer, got `bool`", "top_k"),
    ({"sampling": {"samplers": ["top_k", 3]}}, "samplers[1] must be a string, got `int`", "samplers"),
    ({"sampling": {"logit_bias": {"7": 1}}}, "a key of logit_bias must be an integer", "logit_bias"),
    ({"sampling": {"ignore_eos": 1}}, "ignore_eos must be true or false", "ignore_eos"),
    ({"sampling": {"grammar": b"g"}}, "grammar must be a string or null", "grammar"),
    ({"beams": 4}, "message is not valid: Object contains unknown field `beams`", None),
    ({"x\ny": 4}, "message is not valid: Object contains unknown field `x y`", None),
    ({"op": "tokens"}, "op is not valid: Invalid value 'tokens'", "op"),
]


@pytest.mark.parametrize("changes, text, field", WRONG)
def test_a_wrong_field_is_refused_by_name(changes, text, field):
    with pytest.raises(RequestError) as error:
        read(packed({"op": "submit", "id": "a", "prompt": b"", **changes}), TO_RANK_0)
    assert text in str(error.value) and error.value.field == field


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"finish_reason": "stop\n"}, "finish_reason must be a string matching"),
        ({"tokens": [1, 2.0]}, "tokens.1. must be an integer, got `float`"),
        (
            {"prompt_logprobs": {"width": 2, "chosen": bytes(8), "tokens": bytes(4), "logprobs": bytes(8)}},
            "1 scores with",
        ),
        (
            {"prompt_logprobs": {"width": 2, "chosen": bytes(7), "tokens": b"", "logprobs": b""}},
            "prompt_logprobs is not",
        ),
        ({"op": "embedding", "vector": bytes(6)}, "vector must be float32 bytes"),
        ({"op": "status", "state": "fine"}, "state must be a string matching"),
    ],
)
def test_a_wrong_answer_of_rank_0_is_refused(changes, text):
    good = {"tokens": {"tokens": []}, "embedding": {"prompt_tokens": 1, "cached_tokens": 0}, "status": {}}
    op = changes.get("op", "tokens")
    with pytest.raises(RequestError, match=text):
        read(packed({"op": op, **good[op], **({"id": "a"} if good[op] else {}), **changes}), FROM_RANK_0)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=2)
    ),
    max_leaves=4,
)
KINDS = {"prepared": PREPARED, "embeddingwork": ANSWERED[1], "refusal": ANSWERED[2]}
NAMES = st.sampled_from(sorted({item.name for answer in ANSWERED for item in structs.fields(answer)}))


@settings(max_examples=300, deadline=None)
@given(values | st.dictionaries(NAMES, values, max_size=3), st.sampled_from([*KINDS, "?"]), st.binary(max_size=9))
def test_a_worker_that_was_taken_over_gives_an_answer_of_ours_or_an_error(changes, op, noise):
    good = msgpack.decode(packed(KINDS.get(op, PREPARED)))
    head = packed({**good, **changes, "op": op} if isinstance(changes, dict) else changes)
    for data in (head, head[: len(noise)] + noise + head[2 * len(noise) :]):
        try:
            answer = read_answer(data)
        except EngineError as error:
            assert "\n" not in str(error)
        else:
            assert packed(read_answer(packed(answer))) == packed(answer)
            assert data is not head or type(answer) is type(KINDS[op])
