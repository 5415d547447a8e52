"""The flags of every command: what they mean, what they refuse, and in which words."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist.cli.arguments import parse_arguments, parser_for
from ckdist.config.bench_config import BenchConfig
from ckdist.config.commands import TrainCommand
from ckdist.config.engine_config import EngineConfig
from ckdist.config.generate_config import GenerateConfig
from ckdist.config.options import byte_size, present_names
from ckdist.config.perplexity_config import PerplexityConfig
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError

COMMANDS = (ServeConfig, GenerateConfig, PerplexityConfig, BenchConfig)


def parse(config_class, line):
    return parse_arguments(config_class, line.split(), "ckdist x")


def test_llama_server_names():
    config = parse(
        ServeConfig,
        "-m a.gguf -c 8192 -t 4 -tb 8 -b 1024 -ub 256 -np 16 -ctk q8_0 -ctv bf16 --port 0 -a name --kv-memory 1.5G",
    )
    assert (config.model, config.ctx_size, config.threads, config.threads_batch) == ("a.gguf", 8192, 4, 8)
    assert (config.batch_size, config.ubatch_size, config.parallel) == (1024, 256, 16)
    assert (config.cache_type_k, config.cache_type_v, config.port, config.alias) == ("q8_0", "bf16", 0, "name")
    assert config.kv_memory == 3 << 29


def test_defaults_are_those_of_the_fields():
    for config_class in (ServeConfig, GenerateConfig, BenchConfig):
        assert parse(config_class, "") == config_class()


def test_a_flag_keeps_its_former_name_for_one_release():
    assert parse(ServeConfig, "--reorganize off") == parse(ServeConfig, "--repack=off") == ServeConfig(repack="off")
    assert "reorganize" not in parser_for(ServeConfig, "x").format_help()
    assert present_names(EngineConfig, {"reorganize": "off", "threads": 1}) == {"repack": "off", "threads": 1}
    with pytest.raises(ConfigError, match=r"--repack.*'on'"):
        parse(ServeConfig, "--reorganize on")


def test_lists_repeats_and_values_with_dashes():
    assert parse(BenchConfig, "machine -p 128,512 -n 0").n_prompt == (128, 512)
    assert parse_arguments(GenerateConfig, ["-p", "- a list", "--stop", "---", "--stop=-t"], "x").stop == ("---", "-t")
    assert parse(PerplexityConfig, "--token-ids 1,2,3").token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    "config_class, line, words",
    [
        (ServeConfig, "--ctxsize 3", "unknown flag --ctxsize, did you mean --ctx-size?"),
        (ServeConfig, "-ctx 3", "unknown flag -ctx, did you mean -c"),
        (ServeConfig, "--port 70000", "--port (70000) must be from 0 to 65535"),
        (ServeConfig, "-t x", "'x' is not a whole number"),
        (ServeConfig, "-t", "-t needs a value"),
        (ServeConfig, "-m -t 2", "-m needs a value"),
        (ServeConfig, "-ctk q9", "invalid choice: 'q9'"),
        (ServeConfig, "--kv-memory lots", "is not a size"),
        (ServeConfig, "--verbose=3", "--verbose takes no value"),
        (ServeConfig, "model.gguf", "unrecognized arguments: model.gguf"),
        (GenerateConfig, "--temp nan", "'nan' is not a finite number"),
        (GenerateConfig, "--top-p 1.5", "--top-p (1.5) must be from 0 to 1"),
        (PerplexityConfig, "", "neither was given"),
        (PerplexityConfig, "-f a --token-ids 1", "both was given"),
        (PerplexityConfig, "--token-ids 1,-2", "--token-ids (-2) must be from 0"),
        (BenchConfig, "moon", "invalid choice: 'moon'"),
        (TrainCommand, "a.toml -tp 0", "--tensor-parallel-size (0) must be from 1 to 65536"),
    ],
)
def test_refusals_are_one_line(config_class, line, words):
    with pytest.raises(ConfigError) as refusal:
        parse(config_class, line)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_python_callers_get_the_same_ranges():
    with pytest.raises(ConfigError, match=r"--threads \(-1\) must be from 0"):
        EngineConfig(threads=-1)
    with pytest.raises(ConfigError, match=r"--threads \('2'\) must be a whole number"):
        EngineConfig(threads="2")


@pytest.mark.parametrize("config_class", COMMANDS)
def test_help_names_every_flag(config_class, capsys):
    with pytest.raises(SystemExit) as end:
        parse(config_class, "--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    for action in parser_for(config_class, "x")._actions:
        assert all(flag in text for flag in action.option_strings)


def test_api_key_is_not_in_the_repr():
    assert "hunter2" not in repr(parse(ServeConfig, "--api-key hunter2"))


@given(
    st.lists(
        st.text(max_size=12) | st.sampled_from(["-c", "--port", "-np", "--stop", "--help2", "=", "--=", "-"]),
        max_size=6,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_words_give_a_configuration_or_a_config_error(words):
    if not {"--help", "-h"} & set(words):
        try:
            parse_arguments(ServeConfig, words, "ckdist serve")
        except ConfigError as error:
            assert str(error).isprintable()


@given(st.text(max_size=20))
def test_byte_size_refuses_or_counts(text):
    with contextlib.suppress(ValueError):
        assert byte_size(text) >= 0
