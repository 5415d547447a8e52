"""`--override-kv`: what it takes, what it refuses, and that the metadata of a file and its tokenizer change."""

import pytest

from ckdist.cli.arguments import parse_arguments
from ckdist.config.bench_config import BenchConfig
from ckdist.config.engine_config import EngineConfig
from ckdist.config.generate_config import GenerateConfig
from ckdist.config.perplexity_config import PerplexityConfig
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError, ModelFileError
from ckdist.overrides import metadata_overrides
from ckdist.serve.settings import HttpSettings
from ckdist.tokens.tokenizer_source import tokenizer_of
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.gguf import read_gguf
from ckdist.weights.gguf_writer import write_gguf
from tests.support.paths import GOLDEN

GGUF = GOLDEN / "gguf" / "Q8_0.gguf"


def test_types_commas_quotes_and_repeats():
    arguments = ["a=int:-3,b=float:1e6", "c=bool:true", '"d=str:x, ""y"":z=1",e=str:', "a=int:4"]
    assert metadata_overrides(arguments) == {"a": 4, "b": 1e6, "c": True, "d": 'x, "y":z=1', "e": ""}
    assert metadata_overrides([]) == {}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("a", "'a'\\) is not KEY=TYPE:VALUE"),
        ("a=3", "'a=3'\\) is not KEY=TYPE:VALUE"),
        ("=int:3", "is not KEY=TYPE:VALUE"),
        ("", "is not KEY=TYPE:VALUE"),
        ("a=int:1,", "is not KEY=TYPE:VALUE"),
        ("a=u32:3", "has type 'u32'; the types are int, float, bool, str"),
        ("a=int:1.5", "a is '1.5', not a whole number"),
        ("a=int:" + "9" * 9999, "not a whole number"),
        ("a=float:x", "a is 'x', not a number"),
        ("a=float:nan", "not a finite number"),
        ("a=bool:1", "a is '1', not true or false"),
        ('"a=int:1', "quotes"),
    ],
)
def test_what_is_not_an_override_is_refused(argument, message):
    for make in (lambda: metadata_overrides([argument]), lambda: EngineConfig(override_kv=(argument,))):
        with pytest.raises(ConfigError, match=message) as error:
            make()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("command", [ServeConfig, GenerateConfig, PerplexityConfig, BenchConfig])
def test_every_command_that_runs_a_model_takes_them(command):
    line = [
        "--override-kv",
        "a=int:1",
        "--override-kv=b=bool:true",
        *(["--token-ids", "1,2"] if command is PerplexityConfig else []),
    ]
    assert metadata_overrides(parse_arguments(command, line, "x").override_kv) == {"a": 1, "b": True}


def test_a_file_is_read_with_them():
    stored = read_gguf(GGUF).metadata["qwen3.context_length"]
    checkpoint = open_checkpoint(GGUF, {"qwen3.context_length": 77, "read.by.nothing": "yes"})
    assert stored != 77 == checkpoint.spec.max_position and checkpoint.metadata["read.by.nothing"] == "yes"
    assert checkpoint.overrides == {"qwen3.context_length": 77, "read.by.nothing": "yes"}
    for value, kind in ((77.0, "float"), ("77", "str"), (True, "bool")):
        with pytest.raises(ConfigError, match=f"qwen3.context_length is of type {kind}, but in .* it is int: only"):
            open_checkpoint(GGUF, {"qwen3.context_length": value})
    with pytest.raises(ModelFileError, match="context_length is 0; it must be"):
        open_checkpoint(GGUF, {"qwen3.context_length": 0})
    with pytest.raises(ModelFileError, match=r"attention\.scale is 1000"):
        open_checkpoint(GGUF, {"qwen3.attention.scale": 10**400})
    with pytest.raises(ConfigError, match=r"is a folder: change its config.json"):
        open_checkpoint(GGUF.parent.parent / "llama3", {"a": 1})


def test_a_file_without_a_split_gets_one(tmp_path):
    path = tmp_path / "m.gguf"
    tokens = ["a", "b", "c", "ab"]
    keys = {"tokens": tokens, "token_type": [1] * 4, "merges": ["a b"], "model": "gpt2"}
    write_gguf(path, {f"tokenizer.ggml.{key}": value for key, value in keys.items()}, [])
    with pytest.raises(ModelFileError, match=r"--override-kv tokenizer.ggml.pre=str:NAME"):
        tokenizer_of(path)
    tokenizer = tokenizer_of(
        path, {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.add_bos_token": True}
    )
    assert tokenizer.encode("abc") == [2, 3, 2]
    with pytest.raises(ConfigError, match=r"tokenizer.ggml.tokens is of type str, but in .* it is an array"):
        tokenizer_of(path, {"tokenizer.ggml.tokens": "x"})


def test_the_http_process_is_told():
    settings = HttpSettings(
        endpoint="", model="m", model_name="m", listener=0, parent=0, overrides={"a": 1, "b": 1.5, "c": True, "d": "x"}
    )
    assert HttpSettings.from_json(settings.to_json()) == settings
