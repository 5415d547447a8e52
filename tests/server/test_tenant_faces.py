"""The tenant of a request, on every face: by its salt under its key, and none without reuse of the cache."""

import httpx
import pytest

from tests.support.served import serving

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
FACES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": CHAT,
    "/completion": {"prompt": "a", "n_predict": 1},
    "/v1/embeddings": {"input": "a"},
    "/embedding": {"content": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
}
KEYS = '[[key]]\nname = "ann"\nkey = "ann1"\n[[key]]\nname = "ann"\nkey = "ann2"\n[[key]]\nname = "bob"\nkey = "bob1"\n'


def key_file(folder, text=KEYS, mode=0o600):
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["own", "shared"])
def served(request, tmp_path_factory):
    file = key_file(tmp_path_factory.mktemp("keys"))
    with serving(api_key_file=str(file), shared_cache=request.param) as (engine, http):
        yield engine, http, request.param


@pytest.mark.parametrize("path", FACES)
def test_tenants(served, path):
    engine, http, shared = served

    def tenant(key, **fields):
        """Of the last sequence; all of a request have one."""
        before = len(engine.submitted)
        answer = httpx.post(http.url + path, json=FACES[path] | fields, headers={"x-api-key": key})
        assert answer.status_code == 200, answer.text
        (found,) = {message["tenant"] for message in engine.submitted[before:]}
        return found

    ann, bob = tenant("ann1"), tenant("bob1")
    assert tenant("ann2") == ann and tenant("ann1", cache_prompt=True, cache_salt=None) == ann
    assert (ann == bob) is shared and (ann == b"") is shared
    salted = [tenant(key, cache_salt=salt) for key in ("ann1", "bob1") for salt in ("x", "y", "x" * 256)]
    assert len({ann, *salted[:3]}) == 4 and len({*salted, ann, bob}) == (4 if shared else 8)
    assert tenant("ann2", cache_salt="x") == salted[0]
    assert tenant("ann1", cache_prompt=False) is None and tenant("ann1", cache_prompt=False, cache_salt="x") is None


@pytest.mark.parametrize("path", FACES)
@pytest.mark.parametrize(
    "fields, words",
    [
        ({"cache_salt": ""}, "cache_salt has 0 characters; it must have 1 to 256"),
        ({"cache_salt": "x" * 257}, "cache_salt has 257 characters"),
        ({"cache_salt": 7}, "cache_salt must be a string, not a number"),
        ({"cache_salt": ["x"]}, "cache_salt must be a string, not a list"),
        ({"cache_prompt": 1}, "cache_prompt must be a boolean, not a number"),
    ],
)
def test_wrong_salts(served, path, fields, words):
    answer = httpx.post(served[1].url + path, json=FACES[path] | fields, headers={"x-api-key": "ann1"})
    assert answer.status_code == 400 and words in answer.text


def test_without_keys_there_is_one_tenant_and_one_for_each_salt():
    with serving() as (engine, http):
        for fields in ({}, {"cache_salt": "x"}, {}):
            httpx.post(http.url + "/v1/completions", json=FACES["/v1/completions"] | fields)
        tenants = [message["tenant"] for message in engine.submitted]
        assert tenants[0] == tenants[2] == b"" and len(tenants[1]) == 32
