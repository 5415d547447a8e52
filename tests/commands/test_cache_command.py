"""`ckdist cache`: what a folder of --cache-disk holds, whether it is sound, and how it gets smaller."""

import json
import os
import time

import pytest

from ckdist.cli.main import run
from ckdist.errors import ConfigError
from tests.support.disk_caches import ask, load


def said(capsys, *words: str) -> tuple[int, list[str]]:
    code = run(["cache", *words], None)
    return code, capsys.readouterr().out.splitlines()


@pytest.fixture
def folder(tmp_path):
    ask("llama3", tmp_path / "cache")
    ask("qwen35", tmp_path / "cache")
    return tmp_path / "cache"


def test_list_shows_models_tokens_and_jobs(folder, capsys):
    code, (head, *rows) = said(capsys, "list", str(folder))
    assert code == 0 and head.split("\t")[1:4] == ["model", "ranks", "tokens"] and len(rows) == 2
    by_model = {row.split("\t")[1].rpartition("/")[2]: row.split("\t") for row in rows}
    assert int(by_model["llama3"][3]) == 19 * 16 and by_model["qwen35"][2] == "1"
    loaded = load("llama3", folder)
    _, (_, *rows) = said(capsys, "list", str(folder))
    assert sum(row.endswith("in use") for row in rows) == 1
    loaded.close()


def test_verify_finds_damage(folder, capsys):
    code, lines = said(capsys, "verify", str(folder))
    assert code == 0 and len(lines) == 3 and all(line.endswith(" 0 are damaged") for line in lines)
    path = next(folder.glob("*/*.states"))
    with path.open("r+b") as file:
        file.seek(99)
        file.write(b"damage")
    code, lines = said(capsys, "verify", str(folder))
    assert code == 1 and next(line for line in lines if line.startswith(str(path))).endswith(" 1 are damaged")


def test_prune_keeps_what_was_stored_last_and_what_stays_is_used(folder, capsys):
    for path in folder.glob("*/*"):
        if next(path.parent.glob("*.states"), None):
            os.utime(path, (time.time() - 5 * 86400,) * 2)
    code, (_, row) = said(capsys, "prune", str(folder), "--days", "3")
    assert code == 0 and "llama3" in row
    code, (_, row) = said(capsys, "prune", str(folder), "--size", "100K")
    assert code == 0 and 0 < int(row.split("\t")[3]) < 19 * 16
    assert sum(path.stat().st_blocks * 512 for path in folder.glob("*/*")) <= 100 << 10
    found, stats = ask("llama3", folder)
    assert found == ask("llama3")[0] and 0 < stats["disk_loaded_tokens_total"] < 288
    code, (_, row) = said(capsys, "verify", str(folder))[0], ("", "")
    assert code == 0
    assert len(said(capsys, "prune", str(folder), "--size", "0")[1]) == 1 and not list(folder.iterdir())


def test_mistakes_are_named(tmp_path, capsys):
    for words in (["list"], ["prune", str(tmp_path)], ["list", str(tmp_path), "--size", "1G"], ["list", "/nowhere"]):
        with pytest.raises(ConfigError):
            run(["cache", *words], None)
    (tmp_path / "foreign").mkdir()
    assert len(said(capsys, "list", str(tmp_path))[1]) == 1
    sound = {"format": 1, "model": "m", "ranks": 1, "block_tokens": 16, "bytes": [{"blocks": 4096, "states": 0}]}
    wrong = {"bytes": [1]}, {"bytes": [{"blocks": "4096", "states": 0}]}, {"bytes": [{"blocks": 1 << 70, "states": 0}]}
    for about in ({}, *({**sound, **more} for more in wrong)):
        (tmp_path / "foreign" / "about.json").write_text(json.dumps(about))
        with pytest.raises(ConfigError, match="not a prompt cache of format 1"):
            run(["cache", "verify", str(tmp_path)], None)
