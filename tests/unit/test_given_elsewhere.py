"""Settings from variables and from the file of --config: their order, their checks, and what nothing reads."""

import pytest

from ckdist.cli.arguments import parse_arguments
from ckdist.config.bench_config import BenchConfig
from ckdist.config.given_elsewhere import misspelt_variables
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError


@pytest.fixture
def parsed(tmp_path, monkeypatch):
    def run(*flags: str, file: str | None = None, **variables: str) -> ServeConfig:
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        path = tmp_path / "serve.toml"
        path.write_text(file or "")
        return parse_arguments(ServeConfig, [*flags, *(["--config", str(path)] * (file is not None))], "ckdist serve")

    return run


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(parsed):
    file = "threads = 1\nctx-size = 2\nparallel = 3\nkv_memory = '64M'\ncors_origin = ['http://a', 'http://b']"
    config = parsed("-t", "5", file=file, CKDIST_THREADS="4", CKDIST_CTX_SIZE="6", CKDIST_PORT="")
    assert (config.threads, config.ctx_size, config.parallel, config.port) == (5, 6, 3, 8080)
    assert (config.kv_memory, config.cors_origin) == (64 << 20, ("http://a", "http://b"))


def test_variables_have_the_types_of_flags(parsed):
    config = parsed(CKDIST_NO_WEBUI="Yes", CKDIST_CORS_ORIGIN="http://a, http://b", CKDIST_MAX_BODY="2M")
    assert (config.no_webui, config.cors_origin, config.max_body) == (True, ("http://a", "http://b"), 2 << 20)


def test_a_table_is_the_json_of_a_text(parsed):
    config = parsed(file="temp = 0.5\n[chat_template_kwargs]\nenable_thinking = false")
    assert config.request_defaults.template_variables == {"enable_thinking": False}
    assert config.request_defaults.sampling == {"temperature": 0.5}


@pytest.mark.parametrize(
    "given, message",
    [
        ({"CKDIST_CTX_SIZE": "many"}, "CKDIST_CTX_SIZE: 'many' is not a whole number"),
        ({"CKDIST_CTX_SIZE": "-4"}, r"CKDIST_CTX_SIZE \(-4\) must be from 0 to"),
        ({"CKDIST_NO_WEBUI": "perhaps"}, r"CKDIST_NO_WEBUI \('perhaps'\) must be true or false"),
        ({"file": "ctxsize = 4"}, "serve.toml has an unknown setting 'ctxsize', did you mean ctx_size?"),
        ({"file": "ctx_size = true"}, r"serve.toml: ctx_size \(True\) must be a whole number"),
        ({"file": "temp = 1\ntemperature = 2"}, "serve.toml gives temperature twice"),
        ({"file": "api_key = 'k'"}, "serve.toml: api_key is a secret, and others may read the file: use api_key_file"),
        ({"file": "config = 'other.toml'"}, "unknown setting 'config'"),
        ({"file": "a = = 1"}, "serve.toml is not TOML"),
        ({"file": "ctx_size = " + "1" * 5000}, "serve.toml is not TOML"),
        ({"file": "cache_disk = []"}, r"serve.toml: cache_disk \(\[\]\) must be a text"),
    ],
)
def test_wrong_values_are_one_line_with_their_place(parsed, given, message):
    with pytest.raises(ConfigError, match=message):
        parsed(**given)


def test_a_variable_that_is_almost_a_flag_is_named():
    lines = misspelt_variables(
        ServeConfig, {"CKDIST_CTXSIZE": "1", "CKDIST_ISA": "avx2", "CKDIST_PORT": "1", "HOME": ""}
    )
    assert lines == ["CKDIST_CTXSIZE is not read; did you mean CKDIST_CTX_SIZE?"]
    assert not misspelt_variables(BenchConfig, {"CKDIST_ISA": "avx2"})
