"""Commands on bad input: one clear line, exit code 2, nothing half-done; alone and under mpirun; interrupted and cut
off.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckdist.cli import main as program
from ckdist.cli.arguments import parse_arguments
from ckdist.cli.generate import sampling_of
from ckdist.config.generate_config import GenerateConfig
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import ConfigError
from tests.support.launcher import environment, run_ranks
from tests.support.paths import GOLDEN

GGUF = GOLDEN / "gguf" / "Q8_0.gguf"
FOLDER = GOLDEN / "llama3"  # 210 tokens, 512 positions


class Ended(BaseException):
    """The process would have ended at once."""


@pytest.fixture
def ckdist(monkeypatch, capfd):
    """Runs one command in this process: its exit code, standard output and standard error."""

    def leave(code):
        raise Ended(code)

    def run(*words):
        capfd.readouterr()
        try:
            code = program.main([str(word) for word in words])
        except Ended as end:
            (code,) = end.args
        return code, *capfd.readouterr()

    for name in program.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "_exit", leave)
    return run


@pytest.fixture
def refused(ckdist):
    """Runs a command that must be refused; the line without its name."""

    def run(*words):
        code, out, err = ckdist(*words)
        assert (code, out) == (2, ""), (code, out, err)
        assert err.startswith("ckdist: ") and err.count("\n") == 1 and err.endswith("\n"), err
        return err[8:-1]

    return run


def score(*words):
    return ("perplexity", "-m", FOLDER, "--token-ids", "1,2,3", "-t", 1, *words)


def generate(*words):
    return ("generate", "-m", GGUF, "-t", 1, "--temp", 0, *words)


def folder(tmp_path, **changes) -> pathlib.Path:
    """A copy of a small model's folder, with fields of its config.json changed."""
    made = tmp_path / "model"
    shutil.copytree(FOLDER, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | changes))
    return made


@pytest.mark.parametrize(
    "words, line",
    [
        (["fly"], f"unknown command 'fly': use one of {', '.join(program.COMMANDS)}"),
        (["generate", "--tmep", "1"], "unknown flag --tmep, did you mean --temp?; see ckdist generate --help"),
        (["serve", "--port", "70000"], "--port (70000) must be from 0 to 65535"),
        (["generate", "-n", "many"], "-n/--n-predict: 'many' is not a whole number; see ckdist generate --help"),
        (
            ["generate", "-m", ""],
            "--model is empty: use a GGUF file, a folder or a name, or leave the flag out for the bundled model",
        ),
        (["bench", "-p", "0", "-n", "0"], "--n-prompt 0 and --n-gen 0 leave nothing to measure: give one of them"),
        (["train", "/dev/zero"], "cannot read /dev/zero: it is a device, not a regular file"),
        (
            ["perplexity", "-m", GGUF, "-f", "/dev/zero"],
            "cannot read --file /dev/zero: it is a device, not a regular file",
        ),
        (
            ["serve", "-m", GGUF, "--port", "0", "--api-key-file", "/dev/zero"],
            "cannot read --api-key-file /dev/zero: it is not a regular file",
        ),
        (generate("-p", "a\udcff"), "the text is not valid Unicode: it has bytes or escapes that are no characters"),
        (["perplexity"], "--file or --token-ids is needed, but neither was given"),
        (
            ["bench", "--kv-memory", "lots"],
            "--kv-memory: 'lots' is not a size; write for example 4G or 512M; see ckdist bench --help",
        ),
    ],
)
def test_command_lines(refused, words, line):
    assert refused(*words) == line


def test_no_command_prints_the_usage(ckdist):
    assert ckdist()[0] == 2 and "usage:" in ckdist()[1]
    assert ckdist("--help")[0] == 0 and ckdist("--version")[:2] == (0, f"{program.__version__}\n")


@pytest.mark.parametrize(
    "content, line",
    [
        (None, "is neither a file or folder nor a known model"),
        (b"", "not a GGUF file: it begins with b'', not b'GGUF'"),
        (b"Once upon a time", "not a GGUF file: it begins with b'Once'"),
        (b"GGUF\x09" + bytes(40), "GGUF version 9 is not known; the known ones are 2 and 3"),
        (3, "not a GGUF file: it begins with b'GGU'"),
        (20, "is truncated or damaged"),
        (5000, "is truncated or damaged"),
        (100_000, "ends at byte 152544, but the file has 100000 bytes: it is truncated or damaged"),
        (-1, "is truncated or damaged"),
    ],
)
def test_files_that_are_no_models(refused, tmp_path, content, line):
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(GGUF.read_bytes()[:content] if isinstance(content, int) else content)
    said = refused("generate", "-m", path)
    assert str(path) in said and line in said


def test_folders_that_are_no_models(refused, tmp_path):
    assert "has no config.json; give a folder with one, or a GGUF file" in refused("generate", "-m", tmp_path)
    made = folder(tmp_path, architectures=["NewForCausalLM"])
    refusal = refused("generate", "-m", made)
    assert "architecture 'NewForCausalLM' is not known, and no known one has a similar name" in refusal
    shutil.rmtree(made)
    tensors = load_file(folder(tmp_path) / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, made / "model.safetensors")
    assert "tensor 'model.norm.weight' of shape (96,) is missing" in refused("generate", "-m", made)
    save_file(tensors | {"model.norm.weight": norm[:5]}, made / "model.safetensors")
    assert "tensor 'model.norm.weight' has shape (5,), but the model needs (96,)" in refused("generate", "-m", made)
    names = dict.fromkeys([*tensors, "model.norm.weight"], "model-00001-of-00002.safetensors")
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (made / "model.safetensors").unlink()
    assert "model-00001-of-00002.safetensors is missing" in refused("generate", "-m", made)


def test_contexts_that_do_not_fit(refused, ckdist, tmp_path, monkeypatch):
    assert "--ctx-size 16777216 is more than the 512 positions of the model: --ctx-size 512 is its longest" in refused(
        *score("-c", 1 << 24)
    )
    said = refused(*score("-c", 512, "--kv-memory", "100K"))
    fits = int(said.split("--ctx-size ")[-1].split()[0])
    assert "for its i16 cache on each rank, and 100.0 KiB are free for it" in said and 0 < fits < 512
    assert ckdist(*score("-c", fits, "--kv-memory", "100K"))[0] == 0

    long = folder(tmp_path, max_position_embeddings=1 << 30)
    monkeypatch.setattr("ckdist.layouts.memory_sizes.native", Native(free=1 << 28))
    words = ("perplexity", "-m", long, "--token-ids", "1,2,3", "-t", 1)
    said = refused(*words, "-c", 1 << 24)
    assert "GiB for its i16 cache on each rank, and 255." in said and "MiB are free for it" in said
    fits = int(said.split("--ctx-size ")[-1].split()[0])
    assert ckdist(*words, "-c", fits)[0] == 0
    assert f"--ctx-size {fits} would fit" in refused(*words, "-c", fits + 16)
    monkeypatch.setattr("ckdist.layouts.memory_sizes.native", Native(free=1 << 16))
    assert "the weights of rank 0 take" in refused(*words)
    experts = ("perplexity", "-m", GOLDEN / "glm4moe", "--token-ids", "1,2,3", "-t", 1)
    monkeypatch.setattr("ckdist.layouts.memory_sizes.native", Native(free=1 << 19))
    said = refused(*experts)
    assert re.search(r"take 1\.0 MiB \(experts 432\.0 KiB, others \d+\.\d KiB\), and its cache at least", said)
    assert (
        "512.0 KiB are free for it (0.25 GiB of memory less 0.25 GiB for everything else): 3 such hosts would "
        "hold the model" in said
    )


class Native:
    """`ckdist.native` on a machine with `free` bytes of memory beside the planner's reserve."""

    def __init__(self, free: int):
        from ckdist.layouts.memory_sizes import RESERVE

        self.lib = self
        self.free = free + RESERVE

    def ckdist_available_memory(self) -> int:
        return self.free

    def ckdist_promised_memory(self) -> int:
        return 0


def test_flags_that_do_not_fit_the_model(refused, tmp_path):
    assert "token id 210 is outside the vocabulary of 210" in refused(*score()[:3], "--token-ids", "1,210")
    assert "1 tokens cannot be scored: give at least 2" in refused(*score()[:3], "--token-ids", "1")
    assert f"cannot read --file {tmp_path}: it is a folder, not a regular file" in refused(*score()[:3], "-f", tmp_path)
    assert "--n-prompt 600 is longer than the context of 512: the model's longest is 512" in refused(
        "bench", "-m", FOLDER, "-p", 600, "-t", 1
    )
    assert "--quantize q8_0 changes nothing in" in refused(*generate("--quantize", "q8_0"))


def test_prompt_longer_than_the_context(refused):
    assert "does not fit the context of 32" in refused(*generate("-c", 32, "-p", "word " * 200))


def test_logits_are_saved_whole_or_not_at_all(refused, ckdist, tmp_path):
    out = tmp_path / "logits.npy"
    assert ckdist(*score("--save-logits", out))[0] == 0
    assert np.load(out).shape == (3, 210) and os.listdir(tmp_path) == ["logits.npy"]
    assert f"cannot write --save-logits {tmp_path}: it is a folder" in refused(*score("--save-logits", tmp_path))
    assert "No such file or directory" in refused(*score("--save-logits", tmp_path / "no" / "x.npy"))
    assert "3 tokens needs a context of 3, not 2: use --ctx-size 3" in refused(
        *score("-c", 2, "--save-logits", tmp_path / "y.npy")
    )
    assert os.listdir(tmp_path) == ["logits.npy"]


def test_port_in_use(refused):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert (
            refused("serve", "-m", GGUF, "--port", port)
            == f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --host or --port"
        )


@pytest.mark.parametrize(
    "words, code, said",
    [
        ("--help >/dev/full", 1, "ckdist: the system refused: [Errno 28] No space left on device\n"),
        ("fly 2>&- ", 2, ""),  # and not on standard output
        ("fly 2>/dev/full", 2, ""),
    ],
)
def test_outputs_that_take_nothing(words, code, said):
    done = subprocess.run(
        f"exec {sys.executable} -m ckdist.cli.main {words}",
        shell=True,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_under_mpirun_the_line_appears_once():
    with socket.create_server(("127.0.0.1", 0)) as held:
        for words, line in (
            (("generate", "--tmep", "1"), "unknown flag --tmep"),
            (("generate", "-m", "nothing.gguf"), "'nothing.gguf' is neither a file or folder"),
            (score("-c", 4096), "--ctx-size 4096 is more than the 512 positions"),
            ((*score()[:3], "-f", "/nonexistent"), "cannot read --file /nonexistent"),
            (("serve", "-m", GGUF, "--port", held.getsockname()[1]), "Address already in use"),
        ):
            done = run_ranks(2, "-m", "ckdist.cli.main", *map(str, words), timeout=60)
            assert done.returncode == 2 and done.stdout == "", done
            assert done.stderr.count("ckdist: ") == done.stderr.count(line) == 1 and "Traceback" not in done.stderr, (
                done.stderr
            )


def start_endless(tmp_path) -> subprocess.Popen:
    """A command that generates for minutes."""
    key = b"qwen3.context_length" + (4).to_bytes(4, "little")
    before, after = GGUF.read_bytes().split(key)
    path = tmp_path / "long.gguf"
    path.write_bytes(before + key + (1 << 20).to_bytes(4, "little") + after[4:])
    words = ("generate", "-m", path, "-c", 1 << 18, "-n", 1 << 17, "-t", 1, "--ignore-eos", "-p", "a")
    return subprocess.Popen(
        [sys.executable, "-m", "ckdist.cli.main", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )


@pytest.mark.cold
def test_interrupted_while_generating(tmp_path):
    process = start_endless(tmp_path)
    assert process.stdout.read(1)  # it has begun
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err, err


def test_reader_that_goes_away(tmp_path):
    process = start_endless(tmp_path)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    err = process.stderr.read()
    process.stderr.close()
    assert b"Traceback" not in err and b"Error" not in err, err


def test_generate_takes_the_samplers_flags_of_llama_cli():
    flags = (
        "--typical 0.7 --top-nsigma 1.5 --xtc-probability 0.3 --xtc-threshold 0.2 --repeat-penalty 1.2 "
        "--presence-penalty -0.5 --frequency-penalty 0.4 --repeat-last-n 64 --dry-multiplier 0.8 --dry-base 1.5 "
        "--dry-allowed-length 3 --dry-penalty-last-n 100 --mirostat 2 --mirostat-lr 0.2 --mirostat-ent 4 "
        r"--dry-sequence-breaker \n\n --dry-sequence-breaker a\"b --dynatemp-range 0.5 --dynatemp-exp 2 "
        "--samplers top_k;temperature --temp 1.5 -n 7"
    )
    params = sampling_of(parse_arguments(GenerateConfig, flags.split(), "ckdist generate"))
    assert params == SamplingParams(
        max_tokens=7, temperature=1.5, top_k=40, top_p=0.95, min_p=0.05, typical_p=0.7, top_n_sigma=1.5,
        xtc_probability=0.3, xtc_threshold=0.2, repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.4,
        repeat_last_n=64, dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=3, dry_penalty_last_n=100,
        dry_sequence_breakers=("\n\n", 'a"b'), mirostat=2, mirostat_eta=0.2, mirostat_tau=4.0, dynatemp_range=0.5,
        dynatemp_exponent=2.0, samplers=("top_k", "temperature"),
    )  # fmt: skip
    assert params.active_samplers == ("penalties", "dry", "temperature")  # mirostat takes the place of the others
    default = sampling_of(parse_arguments(GenerateConfig, [], "ckdist generate"))
    assert default == SamplingParams(max_tokens=128, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    assert default.steps is None
    none = parse_arguments(GenerateConfig, ["--dry-sequence-breaker", "none"], "ckdist generate")
    assert sampling_of(none).dry_sequence_breakers == ()
    with pytest.raises(ConfigError, match=r"--samplers: .* has the unknown sampler 'adaptive'; the known ones are"):
        parse_arguments(GenerateConfig, ["--samplers", "top_k;adaptive"], "ckdist generate")


def test_an_error_is_one_line_whatever_it_quotes(capsys):
    program.report(ConfigError("no model a\nb\x1b[2J\udcff"), None)
    assert capsys.readouterr().err == "ckdist: no model a\\nb\\x1b[2J\\udcff\n"
