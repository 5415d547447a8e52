"""`ckdist distill` and a training that follows its file: the teacher's probabilities, a stop, foreign and damaged
files, and a loss that falls on one and on two ranks.
"""

import itertools
import json
import pathlib

import numpy as np
import pytest

from ckdist.cli import distill, evaluate, scored_data
from ckdist.cli.distill import top_choices
from ckdist.cli.main import run
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import BUNDLED, load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError
from ckdist.tokens.tried import load_tried
from ckdist.train.config import TrainConfig
from ckdist.train.data.teacher_file import HEADER_BYTES, Header, TeacherFile
from ckdist.train.trainer import train
from tests.support.thread_ranks import run_threads

WORDS = ("yes", "no", "red", "blue, green and a longer answer of many words", "pink", "grey")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distilled")
    chats = [
        {"messages": [{"role": "user", "content": f"Say {w}."}, {"role": "assistant", "content": w * n}]}
        for w in WORDS
        for n in (1, 7)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    # Steps of 128 tokens and a context of 64: some chats share a step, longer ones are computed in windows.
    assert run(words(folder, folder / "t.kl"), None) == 0
    return folder


def words(folder, out) -> list[str]:
    flags = ["--top-k", "16", "-t", "1", "-tp", "1", "-c", "64", "-ub", "48", "-np", "3"]
    return ["distill", str(folder / "chats.jsonl"), "-m", str(BUNDLED), "-o", str(out), *flags]


def test_records_are_the_probabilities_of_the_teacher(data):
    teacher = TeacherFile(data / "t.kl")
    config = settings(data, data / "seen", max_steps=0)
    train(config)
    [folder] = (data / "cache").iterdir()
    meta = json.loads((folder / "meta.json").read_text())
    tokens = np.fromfile(folder / "tokens.bin", meta["dtype"])
    starts, learned = np.fromfile(folder / "starts.bin", np.int64), np.fromfile(folder / "learned.bin", np.uint8)
    model = load_model(EngineConfig(model=str(BUNDLED), threads=1, ctx_size=256), SingleWorld())
    at, longest = 0, 0
    for begin, end in itertools.pairwise(starts.tolist()):
        size = int(learned[begin + 1 : end].sum())
        if end - begin <= 64:  # one window of the teacher
            logits = SingleSequence(model.executable).feed(tokens[begin:end])[:-1][learned[begin + 1 : end] > 0]
            x = logits.astype(np.float64)
            logprobs = x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)
            own = teacher.records[at : at + size]
            np.testing.assert_allclose(own["logprobs"], np.take_along_axis(logprobs, own["ids"], 1), atol=2e-3)
            assert own["logprobs"].min(1) == pytest.approx(np.sort(logprobs, 1)[:, -16], abs=2e-3)
        at, longest = at + size, max(longest, int(end - begin))
    assert at == len(teacher.records) and longest > 64
    model.close()


def test_a_stopped_run_writes_the_same_bytes(data, monkeypatch):
    out, done = data / "again.kl", []
    monkeypatch.setattr(distill, "SAVE_SECONDS", -1)
    add = distill.TeacherWriter.add

    def killed(self, *given):
        add(self, *given)
        done.append(given[0])
        if len(done) == 4:
            raise ConfigError("killed")

    monkeypatch.setattr(distill.TeacherWriter, "add", killed)
    with pytest.raises(ConfigError, match="killed"):
        run(words(data, out), None)
    part = data / "again.kl.part"
    with open(part, "ab") as file:
        file.write(b"torn")  # as if the kill had cut a write
    assert 0 < json.loads((data / "again.kl.part.state").read_text())["documents"] < 12
    whole = bytearray(part.read_bytes())
    whole[HEADER_BYTES + 9] ^= 1
    part.write_bytes(whole)
    with pytest.raises(ConfigError, match=r"again\.kl\.part is damaged: remove"):
        run(words(data, out), None)
    whole[HEADER_BYTES + 9] ^= 1
    part.write_bytes(whole)
    with pytest.raises(ConfigError, match="another teacher or other data"):
        run([*words(data, out), "--temperature", "2"], None)
    monkeypatch.setattr(distill.TeacherWriter, "add", add)
    assert run(words(data, out), None) == 0 and out.read_bytes() == (data / "t.kl").read_bytes()
    assert not list(data.glob("again.kl.*"))
    with pytest.raises(ConfigError, match="remove it, or give another -o"):
        run([*words(data, out), "--temperature", "2"], None)


def test_a_step_is_all_that_is_in_memory(data, capsys, monkeypatch):
    seen = []
    likelihoods = evaluate.log_likelihoods
    monkeypatch.setattr(evaluate, "log_likelihoods", lambda *given: seen.append(given[1:]) or likelihoods(*given))
    (data / "long.txt").write_text(" ".join(str(number) for number in range(400)))
    flags = ["-m", str(BUNDLED), "-t", "1", "-tp", "1", "-c", "256", "-ub", "48"]
    assert run(["evaluate", str(data / "long.txt"), *flags, "--json"], None) == 0
    result = json.loads(capsys.readouterr().out)
    assert max(len(logits) for logits, _ in seen) <= 128
    assert result["tokens"] > 1000 and result["sequences"] == 1
    ids = load_tried(pathlib.Path(BUNDLED)).encode((data / "long.txt").read_text())
    assert np.concatenate([targets for _, targets in seen]).tolist()[: len(ids) - 1] == ids[1:]


@pytest.mark.parametrize(
    "name, said", [("", "it is a folder"), ("none/t.kl", "there is no folder"), ("t.kl/t.kl", "there is no folder")]
)
def test_a_place_that_cannot_be_written_is_named_before_the_model_loads(data, monkeypatch, name, said):
    monkeypatch.setattr(scored_data, "model_session", None)
    with pytest.raises(ConfigError, match=f"cannot write -o .*{said}"):
        run(words(data, data / name), None)


def settings(data, output, **fields) -> TrainConfig:
    common = {"train_file": (str(data / "chats.jsonl"),), "cache_dir": str(data / "cache"), "max_length": 96}
    common |= {"model_name_or_path": str(BUNDLED), "lora_r": 4, "lora_target_modules": ("all-linear",)}
    common |= {"teacher_file": str(data / "t.kl"), "threads": 1, "bf16": False, "save_steps": 0, "max_steps": 2}
    common |= {"per_device_train_batch_size": 4, "validation_split_percentage": 0.0, "learning_rate": 5e-3}
    return TrainConfig(**common | {"output_dir": str(output)} | fields)


def losses(c, ranks: int = 1) -> list[float]:
    found: list = []
    run_threads(ranks, lambda world: train(c, found.append if world.rank == 0 else None, world=world))
    return [report.loss for report in found]


def test_a_student_follows_its_teacher_on_one_and_two_ranks(data, capsys):
    """The teacher's own divergence is nearly 0, in a training and in an evaluation. That of a new model falls."""
    assert run([*words(data, data / "whole.kl"), "-c", "256", "-ub", "256"], None) == 0
    whole = {"teacher_file": str(data / "whole.kl"), "max_length": 256}
    [own] = losses(settings(data, data / "own", **whole, max_steps=1))
    assert own < 1e-3
    flags = ["-m", str(BUNDLED), "--teacher", str(data / "whole.kl"), "-t", "1", "-tp", "1", "-c", "256", "--json"]
    assert run(["evaluate", str(data / "chats.jsonl"), *flags], None) == 0
    result = json.loads(capsys.readouterr().out)
    plain = settings(data, data / "plain", teacher_file="", max_length=256, max_steps=1, per_device_train_batch_size=12)
    assert result["divergence"] < 1e-3 and result["loss"] == pytest.approx(losses(plain)[0], rel=1e-3)
    model = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48}
    model |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    new = {"model_name_or_path": "", "model_config": model, "tokenizer_name": str(BUNDLED), "lora_r": 0}
    new |= {"max_steps": 8, "learning_rate": 1e-2, "teacher_weight": 0.7}
    one = losses(settings(data, data / "one", **new))
    two = losses(settings(data, data / "two", **new, per_device_train_batch_size=2), 2)
    assert one[-1] < 0.9 * one[0] and two == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda b: b[:-9], "bytes, and its"),
        (lambda b: b[:5000] + bytes([b[5000] ^ 1]) + b[5001:], "is damaged"),
        (lambda b: b"{" + b[1:].replace(b'"choices": 16', b'"choices": 99'), "bytes, and its"),
        (lambda b: b"nothing", "is no teacher file"),
        (
            lambda b: b[:HEADER_BYTES].replace(b'"choices": 16', b'"choices": -6') + b[HEADER_BYTES:],
            "is no teacher file",
        ),
    ],
)
def test_damaged_files_are_refused(data, tmp_path, change, said):
    (tmp_path / "t.kl").write_bytes(change((data / "t.kl").read_bytes()))
    with pytest.raises(ConfigError, match=said):
        train(settings(data, tmp_path / "out", teacher_file=str(tmp_path / "t.kl")))


def test_other_data_and_settings_are_refused(data, tmp_path):
    (tmp_path / "other.jsonl").write_text((data / "chats.jsonl").read_text().replace("pink", "gold"))
    with pytest.raises(ConfigError, match=r"has other tokens, probably of other data \(data "):
        train(settings(data, tmp_path / "out", train_file=(str(tmp_path / "other.jsonl"),)))
    for fields in ({"method": "dpo"}, {"pipeline_parallel_size": 2}, {"validation_file": ("a",)}):
        with pytest.raises(ConfigError, match=r"must be .* with a teacher_file: leave it out"):
            settings(data, tmp_path / "out", **fields)
    with pytest.raises(ConfigError, match=r"teacher_weight .* has no effect without a teacher_file"):
        settings(data, tmp_path / "out", teacher_file="", teacher_weight=0.5)


def test_the_choices_are_the_most_probable_known_tokens():
    logits = np.random.default_rng(2).normal(0, 3, (5, 40)).astype(np.float32)
    header = Header("", "", "", "", "", 6, 2.0, 9, 9)
    ids, logprobs = top_choices(logits, header, 30)
    x = logits.astype(np.float64) / 2
    x -= np.log(np.exp(x).sum(1, keepdims=True))
    np.testing.assert_array_equal(ids, np.sort(np.argsort(-x[:, :30], 1)[:, :6], 1))
    np.testing.assert_allclose(logprobs, np.take_along_axis(x, ids, 1), atol=1e-6)
