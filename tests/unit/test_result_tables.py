"""The tables of the pages are those of the records in benchmarks/results."""

import importlib.util
import re
import sys

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("result_tables", ROOT / "benchmarks" / "result_tables.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_pages_show_the_tables_of_the_records(tables):
    pages = tables.pages()
    assert ROOT / "README.md" in pages and ROOT / "docs/performance/levels.md" in pages
    for page in pages:
        assert tables.written(page) == tables.text(page), f"{page}: run python benchmarks/result_tables.py"


def test_every_record_is_on_a_page_and_its_command_exists(tables):
    shown = {name for page in tables.pages() for _, name in tables.BLOCK.findall(tables.text(page))}
    assert shown == {path.stem for path in tables.RESULTS.glob("*.json")}
    for name in shown:
        for script in re.findall(r"benchmarks/\w+\.py", tables.load(name).command):
            assert (ROOT / script).exists(), f"{name}: {script}"


def test_a_table_keeps_the_digits_of_its_record(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "base.json").write_text('{"compares": "Rates", "columns": ["a", "b"], "rows": [["x", [1024, 1.50]]]}')
    (tmp_path / "view.json").write_text(
        '{"compares": "Rates", "columns": ["c", "b"],'
        ' "rows": [{"from": "base", "row": ["x"], "as": ["y"]}, ["z", null]]}'
    )
    assert tables.table(tables.load("view")).startswith("| c | b |\n| --- | --- |\n| y | 1,024 / 1.50 |\n| z | – |\n")
