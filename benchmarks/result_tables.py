"""Writes the tables of benchmarks/results into the pages.

    python benchmarks/result_tables.py            write all tables
    python benchmarks/result_tables.py --check    fail if a page differs from its records

A record is a JSON file with the fields of `Record`. A page shows it between two comments, the first of which names it:

    <!-- result: levels -->
    <!--end-->

Numbers appear in the page with the digits that they have in the file.
"""

import argparse
import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- result: (\w+) -->\n).*?<!--end-->", re.DOTALL)
COLUMNS = 120


class Record(NamedTuple):
    """One table, and the conditions of its numbers."""

    compares: str  # a sentence: what is compared, and the unit
    columns: list[str]
    # One list of cells per row. A cell is a number, a text, null, or a list of these. In place of a row may stand
    # {"from": another record, "row": the first cells of its row, "as": the first cells to show}.
    rows: list[Any]
    date: str = ""  # of the measurement
    cpu: str = ""
    commit: str = ""  # whose message or pages recorded the numbers
    command: str = ""
    notes: str = ""  # sentences that the page has below the table
    details: str = ""  # sentences that only the record has

    def values(self) -> Iterator[list[Any]]:
        """The rows; those of other records are looked up by the names of the columns."""
        for row in self.rows:
            if not isinstance(row, dict):
                yield row
                continue
            source = load(row["from"])
            cells = next(cells for cells in source.values() if cells[: len(row["row"])] == row["row"])
            by_name = dict(zip(source.columns, cells, strict=True))
            yield [*row["as"], *(by_name[name] for name in self.columns[len(row["as"]) :])]


def load(name: str) -> Record:
    text = (RESULTS / f"{name}.json").read_text()
    return Record(**json.loads(text, parse_float=Decimal))


def cell(value: Any) -> str:
    """A number keeps its digits; a list is joined by slashes; null is a dash."""
    if isinstance(value, list):
        return " / ".join(cell(part) for part in value)
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(record: Record) -> str:
    """The table in Markdown, and below it a paragraph with its conditions."""
    lines = [record.columns, ["---"] * len(record.columns), *record.values()]
    assert all(len(line) == len(record.columns) for line in lines), record.compares
    conditions = [record.compares, ", ".join(filter(None, (record.cpu, record.date, record.commit)))]
    if record.command:
        conditions[1] += f": `{record.command}`"
    text = " ".join(part if part.endswith(".") else f"{part}." for part in (*conditions, record.notes) if part)
    text += " <!--end-->"
    rows = "\n".join(f"| {' | '.join(cell(value) for value in line)} |" for line in lines)
    return f"{rows}\n\n{textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)}"


def pages() -> list[pathlib.Path]:
    """The pages that show records."""
    return [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if BLOCK.search(text(page))]


def text(page: pathlib.Path) -> str:
    return page.read_text(encoding="utf-8")


def written(page: pathlib.Path) -> str:
    """The page's text with its tables as the records have them."""
    return BLOCK.sub(lambda block: block[1] + table(load(block[2])), text(page))


def main() -> None:
    """Writes the pages, or compares them."""
    parser = argparse.ArgumentParser(description="Write the tables of benchmarks/results into the pages.")
    parser.add_argument("--check", action="store_true", help="fail if a page differs from its records")
    check = parser.parse_args().check
    for page in pages():
        if (new := written(page)) != text(page):
            if check:
                sys.exit(f"{page.relative_to(ROOT)} differs from its records: run python benchmarks/result_tables.py")
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
