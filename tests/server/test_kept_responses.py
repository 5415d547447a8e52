"""Responses and conversations that are kept: continued, listed, forgotten, and each client's own."""

import httpx
import openai
import pytest

from ckdist.serve.accounts import Account
from ckdist.serve.kept_items import Kept, KeptItems, new_conversation
from ckdist.serve.problems import Problem
from tests.server.test_ollama import text_of
from tests.support.served import serving

KEYS = "[[key]]\nname = 'ann'\nkey = 'ann-secret'\n[[key]]\nname = 'bob'\nkey = 'bob-secret'\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("kept") / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    with serving(api_key_file=str(keys)) as (engine, http):
        yield engine, http.url


def client(server, name="ann"):
    return openai.OpenAI(base_url=f"{server[1]}/v1", api_key=f"{name}-secret", max_retries=0)


def prompt_of(server):
    return text_of(server[0].submitted[-1]["prompt"])


def test_a_response_continues_another_whole_and_streamed(server):
    api = client(server)
    first = api.responses.create(model="m", input="one", instructions="be", max_output_tokens=3)
    second = api.responses.create(model="m", input="two", previous_response_id=first.id, max_output_tokens=3)
    assert prompt_of(server) == f"[user]one[assistant]{first.output_text}[user]two[assistant]"
    assert second.previous_response_id == first.id
    given = {"model": "m", "input": "three", "previous_response_id": second.id, "max_output_tokens": 3}
    third = list(api.responses.create(**given, stream=True))[-1].response
    assert f"[user]two[assistant]{second.output_text}[user]three" in prompt_of(server)
    assert api.responses.retrieve(third.id).output_text == third.output_text
    shown = [item.content[0].text for item in api.responses.input_items.list(third.id, order="asc")]
    assert shown == ["one", first.output_text, "two", second.output_text, "three"]
    api.responses.delete(third.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        api.responses.retrieve(third.id)
    gone = api.responses.create(model="m", input="x", store=False, max_output_tokens=1)
    with pytest.raises(openai.NotFoundError):
        api.responses.create(model="m", input="y", previous_response_id=gone.id)


def test_a_conversation_grows_with_each_response(server):
    api = client(server)
    begun = [{"type": "message", "role": "system", "content": "sys"}]
    conversation = api.conversations.create(items=begun, metadata={"a": "b"})
    first = api.responses.create(model="m", input="one", conversation=conversation.id, max_output_tokens=2)
    api.responses.create(model="m", input="two", conversation={"id": conversation.id}, max_output_tokens=2)
    assert prompt_of(server) == f"[system]sys[user]one[assistant]{first.output_text}[user]two[assistant]"
    items = list(api.conversations.items.list(conversation.id, order="asc"))
    assert [item.role for item in items] == ["system", "user", "assistant", "user", "assistant"]
    assert api.conversations.items.retrieve(items[1].id, conversation_id=conversation.id).content[0].text == "one"
    api.conversations.items.delete(items[1].id, conversation_id=conversation.id)
    api.conversations.items.create(conversation.id, items=[{"type": "message", "role": "user", "content": "more"}])
    api.responses.create(model="m", input="end", conversation=conversation.id, max_output_tokens=1)
    assert "[user]one" not in prompt_of(server) and "[user]more[user]end" in prompt_of(server)
    assert api.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert api.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no conversation"):
        api.conversations.retrieve(conversation.id)


def test_clients_see_only_their_own_and_both_ways_at_once_are_refused(server):
    ann, bob = client(server), client(server, "bob")
    response, conversation = ann.responses.create(model="m", input="a", max_output_tokens=1), ann.conversations.create()
    for call in (
        lambda: bob.responses.retrieve(response.id), lambda: bob.conversations.retrieve(conversation.id),
        lambda: bob.responses.create(model="m", input="b", previous_response_id=response.id),
        lambda: ann.conversations.retrieve(response.id),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError, match="give one"):
        ann.responses.create(model="m", input="b", previous_response_id=response.id, conversation=conversation.id)
    with pytest.raises(openai.BadRequestError, match="metadata must have"):
        ann.conversations.create(metadata={"a": 3})


def test_entries_end_in_time_and_within_bytes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("ckdist.serve.kept_items.time.monotonic", lambda: now[0])
    monkeypatch.setattr("ckdist.serve.kept_items.MAX_CLIENT_BYTES", 3000)
    kept, account = KeptItems(10.0), Account()
    made = [new_conversation([{"type": "message", "content": "x" * 800}], {}) for _ in range(4)]
    for one in made:
        kept.keep(account, one)
    with pytest.raises(Problem, match="there is no conversation"):
        kept.find(account, made[0].shown["id"], "conversation")
    now[0] = 108.0
    assert kept.find(account, made[-1].shown["id"], "conversation") is made[-1]
    now[0] = 115.0
    assert kept.find(account, made[-1].shown["id"], "conversation") is made[-1]
    with pytest.raises(Problem, match="10 seconds after its last use"):
        kept.find(account, made[-2].shown["id"], "conversation")
    kept.keep(account, Kept([{"type": "message", "content": "y" * 5000}], {"id": "resp_1", "object": "response"}))
    with pytest.raises(Problem):
        kept.find(account, "resp_1", "response")


def test_nothing_is_kept_with_zero_seconds():
    with serving(store_responses=0.0) as (_, http):
        body = {"model": "m", "input": "a", "max_output_tokens": 1}
        assert httpx.post(f"{http.url}/v1/responses", json=body).status_code == 200
        refused = httpx.post(f"{http.url}/v1/responses", json={**body, "previous_response_id": "resp_1"})
        assert refused.status_code == 400 and "--store-responses" in refused.text
        assert httpx.post(f"{http.url}/v1/conversations", json={}).status_code == 404
