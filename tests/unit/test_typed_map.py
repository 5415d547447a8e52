"""Records between processes: what comes back, and which maps are refused."""

from dataclasses import fields

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist.engine.messages import (
    FROM_RANK_0,
    TO_RANK_0,
    Embed,
    Failure,
    PromptScores,
    Submit,
    Tokens,
    encode,
    read,
    unpack,
)
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import EngineError, RequestError
from ckdist.serve.api_keys import ApiKey, KeyLimits
from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.settings import HttpSettings
from ckdist.serve.text_records import ANSWERS, EmbeddingWork, Prepared, Refusal, answer_map, read_answer
from ckdist.tokens.tool_format import ToolFormat

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
    assert read(unpack(data), TO_RANK_0 | FROM_RANK_0) == message
    assert not {item.name for item in fields(message) if getattr(message, item.name) == item.default} & {*unpack(data)}


@pytest.mark.parametrize("answer", ANSWERED, ids=lambda answer: type(answer).__name__)
def test_a_workers_answer_comes_back(answer):
    assert read_answer(msgpack.unpackb(msgpack.packb(answer_map(answer)), strict_map_key=False)) == answer


def test_settings_of_the_http_process_come_back():
    keys = (ApiKey("ann", "k", KeyLimits(max_running=2)),)
    given = HttpSettings(
        endpoint="e", model="m", model_name="n", listener=3, parent=1, api_keys=keys, overrides={"a.b": 1.5}
    )
    assert HttpSettings.from_json(given.to_json()) == given


WRONG = [  # changes of a good message, part of the error, its field
    ({"prompt": bytes(3)}, "prompt must be token ids as int32 bytes", "prompt"),
    ({"tenant": bytes(65)}, "tenant must be at most 64 bytes, or null", "tenant"),
    ({"sampling": []}, "sampling must be a map", "sampling"),
    ({"sampling": {"samplers": ["top_k", 3]}}, "samplers must be a list, each item a string", "samplers"),
    ({"sampling": {"logit_bias": {"7": 1}}}, "logit_bias must be an integer", "logit_bias"),
    ({"sampling": {"ignore_eos": 1}}, "ignore_eos must be true or false", "ignore_eos"),
    ({"sampling": {"grammar": b"g"}}, "grammar must be a string or null", "grammar"),
    ({"beams": 4}, "unknown submit field 'beams'", "submit"),
]


@pytest.mark.parametrize("changes, text, field", WRONG)
def test_a_wrong_field_is_refused_by_name(changes, text, field):
    with pytest.raises(RequestError) as error:
        read({"op": "submit", "id": "a", "prompt": b"", **changes}, TO_RANK_0)
    assert text in str(error.value) and error.value.field == field


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
names = st.sampled_from(sorted({item.name for kind in ANSWERS.values() for item in fields(kind)}))


@settings(max_examples=300, deadline=None)
@given(values | st.dictionaries(names, values, max_size=3), st.sampled_from(["prepared", "problem", "json", "?"]))
def test_a_worker_that_was_taken_over_gives_an_answer_of_ours_or_an_error(changes, op):
    good = answer_map(PREPARED if op == "prepared" else Refusal(400, "no"))
    head = {**good, **changes, "op": op} if isinstance(changes, dict) else changes
    try:
        answer = read_answer(head)
    except EngineError as error:
        assert "\n" not in str(error)
    else:
        assert type(answer) is ANSWERS[op] and read_answer(answer_map(answer)) == answer
