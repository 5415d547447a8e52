"""Addresses: TLS, Unix sockets, several of them, a prefix of all paths, with real clients."""

import os
import socket
import ssl
import subprocess

import httpx
import pytest

from ckdist.cli.server_start import curl_line
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError
from ckdist.serve.addresses import check_certificate, close, is_local, listen, listen_all, url_of
from tests.support.clients import openai
from tests.support.served import serving


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    words += ["-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    words += ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_a_client_over_tls_with_a_prefix(certificate, tmp_path):
    cert, key = certificate
    both = [listen("127.0.0.1", 0), listen(f"unix:{tmp_path}/s", 0)]
    with (
        serving(ssl_certfile=cert, ssl_keyfile=key, api_prefix="/llm", insecure=True, listeners=both) as (_, http),
        socket.create_connection(both[0].getsockname()) as silent,
    ):
        assert http.url.startswith("https://127.0.0.1:") and http.url.endswith("/llm")
        trusting = httpx.Client(verify=ssl.create_default_context(cafile=cert))
        api = openai.OpenAI(base_url=f"{http.url}/v1", api_key="k", http_client=trusting, max_retries=0)
        answer = api.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}], max_tokens=3)
        assert answer.choices[0].message.content
        outside = trusting.get(http.url.removesuffix("/llm") + "/v1/models")
        assert outside.status_code == 404 and "all paths begin with /llm" in outside.text
        assert trusting.get(f"{http.url}/v1/models/").status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{http.url}/health")
        moved = trusting.get(http.url)
        assert (moved.status_code, moved.headers["location"]) == (308, "/llm/")
        assert trusting.get(f"{http.url}/page/app.js").status_code == 200
        with httpx.Client(transport=httpx.HTTPTransport(uds=f"{tmp_path}/s")) as local:  # it needs no TLS
            assert local.get("http://localhost/llm/health").status_code == 200
        silent.settimeout(30)
        assert silent.recv(1) == b""  # it has begun no handshake


def test_several_addresses_and_a_unix_socket(tmp_path):
    path = str(tmp_path / "s.sock")
    listeners = listen_all(f"127.0.0.1,127.0.0.2,unix:{path}", 0)
    first, second, unix = listeners
    assert first.getsockname()[1] == second.getsockname()[1] and all(map(is_local, listeners))
    assert url_of(unix) == f"unix:{path}" and os.stat(path).st_mode & 0o777 == 0o600
    with serving(listeners=listeners) as (_, http):
        assert httpx.get(f"http://127.0.0.2:{second.getsockname()[1]}/health").status_code == 200
        with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as local:
            api = openai.OpenAI(base_url="http://localhost/v1", api_key="k", http_client=local, max_retries=0)
            assert api.completions.create(model="m", prompt="ab", max_tokens=2).choices[0].text
        assert http.url == url_of(first)
    assert not os.path.exists(path)


def test_a_socket_that_nobody_listens_on_is_replaced_and_others_are_not(tmp_path):
    path = tmp_path / "s.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    listener = listen(f"unix:{path}", 0)
    with pytest.raises(ConfigError, match=f"cannot listen on unix:{path}: Address already in use"):
        listen(f"unix:{path}", 0)
    close(listener)
    path.write_text("a file")
    with pytest.raises(ConfigError, match="Address already in use"):
        listen(f"unix:{path}", 0)
    assert path.read_text() == "a file"
    with pytest.raises(ConfigError, match="at most 16 different addresses"):
        listen_all("127.0.0.1,127.0.0.1", 0)


def test_the_line_to_try_a_server_on_a_unix_socket():
    line = curl_line("unix:/run/a b/llm", ServeConfig(api_prefix="/llm"), "completions")
    assert line.startswith("curl --unix-socket '/run/a b' http://localhost/llm/v1/completions -H ")


def test_an_ipv6_address_alone_takes_ipv4_too():
    with listen("::", 0) as listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5).close()
    for listener in listen_all("0.0.0.0,::", 0):
        close(listener)


@pytest.mark.parametrize("prefix", ["llm", "/llm/", "/a b", "//"])
def test_a_prefix_has_a_form(prefix):
    with pytest.raises(ConfigError, match="must be like /llm"):
        ServeConfig(api_prefix=prefix)


def test_certificates_are_checked_at_the_start(certificate, tmp_path):
    cert, key = certificate
    check_certificate(None, None)
    check_certificate(cert, key)
    with pytest.raises(ConfigError, match="--ssl-keyfile is missing"):
        check_certificate(cert, None)
    with pytest.raises(ConfigError, match="cannot be used"):
        check_certificate(cert, cert)
    with pytest.raises(ConfigError, match="No such file"):
        check_certificate(cert, str(tmp_path / "none"))
