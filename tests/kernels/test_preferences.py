"""Preferences beside TRL: losses, gradients' norms, rewards and weights over steps of AdamW, on one and two ranks; and
the records of both forms.
"""

import json

import numpy as np
import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.errors import ConfigError
from ckdist.mesh import Mesh
from ckdist.train.config import TrainConfig
from ckdist.train.data.documents import read_documents
from ckdist.train.data.preference_rows import PreferenceRows
from ckdist.train.data.preferences import read_preference
from ckdist.train.data.records import Document
from ckdist.train.data.token_cache import TokenCache
from ckdist.train.optimizer import Optimizer
from ckdist.train.preference_loss import dpo, kto, orpo
from ckdist.train.preference_step import PreferenceStep
from ckdist.train.ranks import TrainingRanks
from tests.support.golden_training import model
from tests.support.paths import GOLDEN
from tests.support.thread_ranks import run_threads
from tests.support.training_executable import executable

CASES = {
    "sigmoid": {"method": "dpo", "beta": 0.3},
    "hinge": {"method": "dpo", "beta": 0.3, "loss_type": "hinge"},
    "ipo": {"method": "dpo", "beta": 0.5, "loss_type": "ipo"},
    "rpo": {"method": "dpo", "beta": 0.3, "rpo_alpha": 0.7},
    "orpo": {"method": "orpo", "beta": 0.3},
    "kto": {"method": "kto", "beta": 0.3, "undesirable_weight": 1.5},
}


def settings(**fields) -> TrainConfig:
    common = {"output_dir": "out", "train_file": ("a",), "model_name_or_path": "m", "per_device_train_batch_size": 4}
    return TrainConfig(**common | {"learning_rate": 5e-4, "threads": 1, "bf16": False} | fields)


def golden(case: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "preferences.npz") as stored:
        return {name.partition("/")[2]: stored[name] for name in stored.files if name.startswith(f"{case}/")}


def rows_of(expected: dict[str, np.ndarray], method: str) -> PreferenceRows:
    """The golden sequences as the rows of a cache; of KTO, the answers alone."""
    pairs = zip(*(expected[name].reshape(-1, expected[name].shape[-1]) for name in ("ids", "answers")), strict=True)
    sequences = [(ids[ids >= 0], mask[ids >= 0]) for ids, mask in pairs]
    own = sequences[::2] if method == "kto" else sequences
    labels = expected["desirable"].ravel() if method == "kto" else np.tile([1, 0], len(own) // 2)
    starts = np.cumsum([0, *(len(ids) for ids, _ in own)])
    tokens, learned = (np.concatenate([part[i] for part in own]) for i in (0, 1))
    cache = TokenCache(tokens, starts, learned, "", np.arange(len(own)), ("a",), labels=labels.astype(np.uint8))
    rows = PreferenceRows(cache, np.arange(len(own)), 64, 1, method, shuffle=False)
    if method == "kto":  # TRL takes the other answer from the same batch
        steps = np.arange(len(own)).reshape(len(expected["losses"]), -1)
        rows.units = np.stack([steps.ravel(), np.roll(steps, 1, axis=1).ravel()], 1)
    batch = rows.batch(0, range(len(rows.units)))
    for begin, end, (ids, mask) in zip(batch.starts[:-1], batch.starts[1:], sequences, strict=True):
        np.testing.assert_array_equal(batch.token_ids[begin:end], ids[:-1])
        np.testing.assert_array_equal(batch.answers[begin:end], mask[1:] > 0)
    return rows


@pytest.mark.parametrize(
    "case, dp, tp", [*((case, 1, 1) for case in CASES), ("rpo", 2, 1), ("kto", 2, 1), ("ipo", 1, 2)]
)
def test_steps_equal_those_of_trl(case, dp, tp):
    config, expected = settings(**CASES[case]), golden(case)
    spec, weights = model("llama3")

    def body(world):
        rows = rows_of(expected, config.method)
        communicator = open_communicator(world, arena_bytes=1 << 26, timeout=30) if dp * tp > 1 else None
        e = executable(spec, 300, weights.__getitem__, communicator=communicator, tp=tp)
        mesh = Mesh.of_job(world.size, world.rank, tp=tp) if communicator else Mesh.of_job(1, 0)
        ranks = TrainingRanks.split(mesh, communicator)
        shards = e.program.trained_shards
        optimizer = Optimizer(config, e.parameters, e.gradients, ranks, None, shards)
        step = PreferenceStep(config, e, ranks)
        step.measure_reference(rows)
        found = []
        for first in range(0, len(rows.units), 4):
            units = np.arange(first, first + 4)[mesh.index("dp") :: dp]
            sums = step.forward_backward([rows.units_batch(part) for part in np.array_split(units, 2)], rows)
            loss, count = ranks.sum_replicas(sums.loss, sums.units)
            norm = optimizer.step(config.learning_rate, int(count)).grad_norm
            found.append(
                (loss / count, norm, *(sums.metrics.get(f"rewards/{x}", np.nan) for x in ("chosen", "rejected")))
            )
        e.close()
        return np.array(found), e.parameters["model.embed_tokens.weight"][:10].copy()

    for found, embeddings in run_threads(dp * tp, body)[:1]:
        np.testing.assert_allclose(found[:, 0], expected["losses"], rtol=2e-5)
        np.testing.assert_allclose(found[:, 1], expected["norms"], rtol=2e-4)
        np.testing.assert_allclose(found[:, 2:], expected["rewards"], rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(embeddings, expected["weights"], atol=3e-5)


def test_derivatives_of_the_losses():
    rng = np.random.default_rng(3)
    policy, reference = -rng.uniform(1, 9, (5, 2)), -rng.uniform(1, 9, (5, 2))
    lengths, good = rng.integers(1, 9, (5, 2)), rng.random(5) < 0.5
    functions = [lambda p, kind=kind: dpo(p, reference, lengths, 0.4, kind) for kind in ("sigmoid", "hinge", "ipo")]
    functions.append(lambda p: orpo(p, lengths, 0.4))
    functions.append(lambda p: kto((p - reference)[:, 0], good, 0.3, 0.4, np.where(good, 1.0, 2.0)))
    for function in functions:
        for column in (0, 1):
            moved = np.zeros((5, 2))
            moved[:, column] = 1e-6
            numeric = (function(policy + moved).losses - function(policy - moved).losses) / 2e-6
            np.testing.assert_allclose(function(policy).slopes[:, column], numeric, atol=1e-7)


AB = [("Q", "a"), ("Q", "b")]
HUMAN = "Human: Q Bot:"


def said(chat: str) -> list[dict]:
    return [{"role": "user", "content": "Q"}, {"role": "assistant", "content": chat}]


@pytest.mark.parametrize(
    "record, kind, expected",
    [
        ({"prompt": "Q", "chosen": "a", "rejected": "b"}, "pairs", AB),
        ({"prompt": said("x")[:1], "chosen": said("a")[1:], "rejected": said("b")[1:]}, "pairs", AB),
        ({"messages": said("z"), "prompt": "Q", "chosen": said("a"), "rejected": said("b")}, "pairs", AB),
        ({"chosen": f"{HUMAN} yes", "rejected": f"{HUMAN} yet"}, "pairs", [(HUMAN, " yes"), (HUMAN, " yet")]),
        ({"prompt": "Q", "completion": "a", "label": False}, "labels", [("Q", "a")]),
        ({"prompt": "Q", "completion": "a", "label": "maybe"}, "labels", "label ('maybe') must be true or false"),
        ({"prompt": "Q", "chosen": "a", "rejected": "a"}, "pairs", "are the same answer"),
        ({"prompt": "Q", "chosen": "a", "rejected": "b"}, "labels", "it has no completion and no label; give prompt"),
        ({"prompt": "P", "chosen": said("a"), "rejected": said("b")}, "pairs", "not among the messages"),
        ({"chosen": said("a"), "rejected": "b"}, "pairs", "rejected must be a list"),
        ({"text": "plain"}, "pairs", "is no preference: give chosen and rejected"),
        ([], "pairs", "not an object"),
    ],
)  # fmt: skip
def test_records(tmp_path, record, kind, expected):
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    (document,) = read_documents(tmp_path / "a.jsonl", "text")
    found = read_preference(document, kind)
    if isinstance(expected, str):
        assert expected in found.why
        return
    assert isinstance(found, Document) and found.labels == ((1, 0) if kind == "pairs" else (0,))
    chats = [found.messages, *found.others]
    assert [tuple(message["content"] for message in chat) for chat in chats] == expected


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"method": "orpo", "loss_type": "ipo"}, r"loss_type \(ipo\) has no effect with method orpo"),
        ({"beta": 0.2}, r"beta \(0.2\) has no effect with method sft"),
        ({"method": "kto", "train_file_weights": (1.0,)}, "train_file_weights .* has no effect with method kto"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        settings(**fields)
