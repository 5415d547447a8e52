"""Responses and conversations that the server keeps, with OpenAI's client."""

import httpx
import pytest

from ckdist.serve.problems import Problem
from ckdist.serve.response_store import Conversation, KeptResponse, ResponseStore
from tests.server.test_ollama import text_of
from tests.support.clients import openai
from tests.support.served import serving

GREEDY = {"model": "bytes", "max_output_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("first-key\nsecond-key\n")
    keys.chmod(0o600)
    with serving(api_key_file=str(keys)) as (engine, http):
        yield engine, http.url


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server[1]}/v1", api_key="first-key", max_retries=0)


@pytest.fixture(scope="module")
def stranger(server):
    return openai.OpenAI(base_url=f"{server[1]}/v1", api_key="second-key", max_retries=0)


def prompt_of(engine):
    return text_of(engine.submitted[-1]["prompt"])


def test_a_response_continues_another_with_the_prompt_of_both(server, client):
    engine, _ = server
    first = client.responses.create(input="ab", instructions="once", **GREEDY)
    second = list(client.responses.create(input="cd", previous_response_id=first.id, stream=True, **GREEDY))[
        -1
    ].response
    continued = prompt_of(engine)
    turns = [("user", "ab"), ("assistant", first.output_text), ("user", "cd")]
    client.responses.create(input=[{"role": role, "content": text} for role, text in turns], **GREEDY)
    assert prompt_of(engine) == continued and "once" not in continued
    assert second.previous_response_id == first.id and second.store
    third = client.responses.create(input="e", previous_response_id=second.id, **GREEDY)
    items = client.responses.input_items.list(third.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]
    assert client.responses.retrieve(third.id).output_text == third.output_text
    newest = client.responses.input_items.list(third.id, limit=2)
    assert [item.id for item in newest] == [item.id for item in reversed(items)]  # the client turns the pages
    client.responses.delete(first.id)
    assert client.responses.create(input="f", previous_response_id=second.id, **GREEDY).output_text


def test_an_unknown_a_deleted_and_another_keys_response_are_404(server, client, stranger):
    kept = client.responses.create(input="ab", **GREEDY)
    unkept = client.responses.create(input="ab", store=False, **GREEDY)
    assert not unkept.store
    calls = [
        lambda: stranger.responses.retrieve(kept.id),
        lambda: stranger.responses.delete(kept.id),
        lambda: stranger.responses.create(input="c", previous_response_id=kept.id, **GREEDY),
        lambda: client.responses.retrieve(unkept.id),
        lambda: client.responses.input_items.list("resp_none"),
        lambda: client.responses.create(input="c", conversation="conv_none", **GREEDY),
        lambda: client.responses.create(input="c", previous_response_id=unkept.id, **GREEDY),
    ]
    for call, name in zip(calls, [kept.id] * 3 + [unkept.id, "resp_none", "conv_none", unkept.id], strict=True):
        with pytest.raises(openai.NotFoundError, match=f"'{name}'.*--store-responses"):
            call()
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(client.responses.create(input="a", **GREEDY).id)


def test_a_conversation_grows_by_responses(server, client, stranger):
    engine, _ = server
    said = {"type": "message", "role": "user", "content": "ab"}
    talk = client.conversations.create(items=[said], metadata={"topic": "letters"})
    answer = client.responses.create(input="cd", conversation=talk.id, **GREEDY)
    assert "ab" in prompt_of(engine) and answer.conversation.id == talk.id
    items = client.conversations.items.list(talk.id, order="asc").data
    assert [item.role for item in items] == ["user", "user", "assistant"]
    more = client.conversations.items.create(talk.id, items=[{**said, "content": "xy"}])
    one = client.conversations.items.retrieve(more.data[0].id, conversation_id=talk.id)
    assert one.id == more.first_id
    client.responses.create(input="z", conversation={"id": talk.id}, store=False, **GREEDY)
    assert "xy" in prompt_of(engine)
    assert client.conversations.items.delete(one.id, conversation_id=talk.id).id == talk.id
    assert client.conversations.update(talk.id, metadata={"topic": "none"}).metadata == {"topic": "none"}
    assert client.conversations.retrieve(talk.id).metadata == {"topic": "none"}
    with pytest.raises(openai.NotFoundError):
        stranger.conversations.retrieve(talk.id)
    assert client.conversations.delete(talk.id).deleted
    with pytest.raises(openai.NotFoundError, match=talk.id):
        client.conversations.items.list(talk.id)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("conversations", {"items": [{"type": "nonsense"}]}, 400, "items[0] has type 'nonsense'"),
        ("conversations", {"items": 3}, 400, "items must be"),
        ("conversations", {"metadata": {"a": 1}}, 400, "metadata['a'] must be a text"),
        ("conversations", {"other": 1}, 400, "unknown field 'other'"),
        ("conversations", {"metadata": {"a": "b" * (1 << 20)}}, 413, "larger than"),
        ("responses", {"input": "a", "conversation": 3}, 400, "conversation must be"),
        ("responses", {"input": "a", "conversation": "c", "previous_response_id": "r"}, 400, "give one"),
        ("responses", b'{"input": "a", "previous\\u005fresponse_id": "r"}', 400, "must not be escaped"),
        ("responses/none/cancel", {}, 404, "'none'"),
        ("batch", {}, 404, ""),
    ],
    ids=str,
)
def test_wrong_requests_are_refused_by_name(server, path, body, status, words):
    data = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"Authorization": "Bearer first-key", "Content-Type": "application/json"}
    answer = httpx.post(f"{server[1]}/v1/{path}", headers=headers, **data)
    assert answer.status_code == status and words in answer.json()["error"]["message"]


def response_of(name, client, size):
    return KeptResponse(name, "key", client, body=b"a" * size)


def test_records_go_after_their_time_and_by_bytes_of_their_client():
    now = [0.0]
    store = ResponseStore(60, lambda: now[0], client_bytes=10_000, total_bytes=25_000)
    records = {name: response_of(name, name[0], 2500) for name in ("a0", "a1", "a2", "a3")}
    for name in ("a0", "a1", "a2"):
        store.put(records[name])
    store.find(KeptResponse, "a0", "key", "response")
    store.put(records["a3"])  # a1 was not used for longer than a0
    assert [name for name in records if store.has(records[name])] == ["a0", "a2", "a3"]
    with pytest.raises(Problem, match="'a1'"):
        store.find(KeptResponse, "a1", "key", "response")
    with pytest.raises(Problem, match="there is no conversation 'a2'"):
        store.find(Conversation, "a2", "key", "conversation")
    store.put(response_of("whole", "b", 20_000))
    with pytest.raises(Problem, match="'whole'"):
        store.find(KeptResponse, "whole", "key", "response")
    for client in "bcd":
        store.put(response_of(client, client, 7000))
    assert not any(map(store.has, records.values()))  # all clients together have a limit, too
    now[0] = 61.0
    with pytest.raises(Problem, match="not used for 60 s"):
        store.find(KeptResponse, "d", "key", "response")
    assert not store._records and not store._bytes


def test_a_server_that_keeps_nothing_says_so():
    store = ResponseStore(0)
    store.put(response_of("a", "a", 1))
    with pytest.raises(Problem, match="nothing is kept \\(--store-responses\\)"):
        store.find(KeptResponse, "a", "key", "response")


def test_keys_that_share_cached_prompts_share_no_responses(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    keys.chmod(0o600)
    with serving(api_key_file=str(keys), shared_cache=True, store_responses=60.0) as (_, http):
        headers = [{"Authorization": f"Bearer {name}-key"} for name in ("first", "second")]
        made = httpx.post(f"{http.url}/v1/responses", headers=headers[0], json={"input": "a", "max_output_tokens": 1})
        found = [httpx.get(f"{http.url}/v1/responses/{made.json()['id']}", headers=one) for one in headers]
        assert [one.status_code for one in found] == [200, 404] and "not used for 60 s" in found[1].text
