"""examples/dagster_batch.py under Dagster: a data set is expanded, a stopped run goes on. Skipped without Dagster."""

import importlib.util
import json
import os
import pathlib
import sys

import pytest

from tests.support.paths import ROOT


def test_a_data_set_is_expanded_and_a_second_run_computes_what_is_missing(tmp_path, monkeypatch):
    dagster = pytest.importorskip("dagster")  # here, because every worker imports this file
    rows = [{"id": number, "question": f"What is {number} + 1?"} for number in range(5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in {"DATA": tmp_path / "data.jsonl", "OUT": tmp_path / "out", "MAX_TOKENS": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("CKDIST_CTX_SIZE", "256")
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    spec = importlib.util.spec_from_file_location("dagster_batch", ROOT / "examples" / "dagster_batch.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assets = [example.requests, example.answers, example.counts]
    assert dagster.materialize(assets).success
    path = tmp_path / "out" / "answers.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    counts = json.loads((tmp_path / "out" / "counts.json").read_text())
    assert counts["answers"] == len(lines) == 10 and counts["tokens"] <= 40
    path.write_text("".join(lines[:4]) + lines[4][:30])
    assert dagster.materialize(assets).success
    assert path.read_text().splitlines(keepends=True)[:4] == lines[:4] and len(path.read_text().splitlines()) == 10
