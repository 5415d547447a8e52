"""Prints measured rows as JSON, CSV or Markdown, or on a terminal as a table that fits its width."""

import csv
import io
import json
import sys
from typing import Any

from ckdist.terminal import is_terminal, print_table


def write_rows(rows: list[dict[str, Any]], output: str) -> None:
    """Prints `rows`. Lists and dicts within them are printed only as JSON."""
    if output == "json":
        print(json.dumps(rows, indent=1))
        return
    shown = [
        {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items() if not isinstance(v, (list, dict))}
        for row in rows
    ]
    names = list(shown[0]) if shown else []
    if output == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(shown)
        print(text.getvalue(), end="")
        return
    if is_terminal(sys.stdout):
        numbers = [n for n in names if all(row[n][:1].isdigit() for row in shown)]
        print_table(names, [[row[n] for n in names] for row in shown], right=numbers)
        return
    widths = {n: max(len(n), *(len(row[n]) for row in shown)) for n in names}
    for cells in ({n: n for n in names}, {n: "-" * widths[n] for n in names}, *shown):
        print("| " + " | ".join(cells[n].ljust(widths[n]) for n in names) + " |")
