"""`ckdist status URL`: a server's state, load and ranks as a table that refreshes.

The numbers come from the events of /v1/machine. Rates are those between two events.
"""

import http.client
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckdist.cli.server_call import call
from ckdist.config.status_config import StatusConfig
from ckdist.errors import EngineError, one_line
from ckdist.terminal import console, is_terminal

if TYPE_CHECKING:
    from rich.table import Table

SILENT_SECONDS = 15.0  # the server sends an event every half a second
MOST_EVENT_BYTES = 4 << 20
MAX_RANKS = 4096
WRONG = ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError  # of an event
Event = Mapping[str, Any]


def run(config: StatusConfig) -> int:
    """Shows the state until it is interrupted, or once. Returns 0."""
    key = config.api_key or os.environ.get("CKDIST_API_KEY", "")
    events = machine_events(config.url, key)
    if config.json or config.once or not is_terminal(sys.stdout):
        before, now = next(events), next(events)
        shown = json.dumps(facts(before, now), indent=2) if config.json else table(before, now)
        console(sys.stdout, 160).print(shown, soft_wrap=config.json)
        return 0
    from rich.live import Live

    before = next(events)
    with Live(console=console(sys.stdout), auto_refresh=False, screen=False) as live:
        for now in events:
            live.update(table(before, now), refresh=True)
            before = now
    raise EngineError(f"{config.url} has ended its stream of events: has it stopped?")


def machine_events(url: str, key: str) -> Iterator[Event]:
    """Yields the events of a server. Raises EngineError if it cannot be reached, or sends something else."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connection, response = call(url, "GET", "/machine", headers, SILENT_SECONDS)
    try:
        while line := response.readline(MOST_EVENT_BYTES):
            if line.startswith(b"data:"):
                yield checked_event(json.loads(line[5:]))
    except (OSError, http.client.HTTPException, *WRONG) as error:
        raise EngineError(f"{url} sends no state of a ckdist server: {one_line(error)}") from None
    finally:
        connection.close()


def checked_event(event: Any) -> Event:
    """Returns an event whose numbers are numbers. Raises one of WRONG for another value."""
    ranks = [dict(rank) for rank in event["ranks"]]
    if len(ranks) > MAX_RANKS:
        raise ValueError(f"{len(ranks)} ranks")
    stats = {name: float(value) for name, value in event["stats"].items()}
    found = {**event, "clock": float(event["clock"]), "stats": stats, "ranks": ranks}
    facts(found, found)
    return found


def facts(before: Event, now: Event) -> dict[str, Any]:
    """Returns the figures of the table. Speeds are in tokens per second, bandwidths in bytes per second."""
    stats, model = now["stats"], now.get("model") or {}
    made = _since(before["stats"], stats, "generated_tokens_total")
    prompts = sum(_since(before["stats"], stats, f"prefill_by_{way}_tokens_total") for way in ("token", "tensor"))
    seconds = now["clock"] - before["clock"]
    read = stats.get("prompt_tokens_total", 0.0)
    return {
        "state": now.get("state"),
        "model": model.get("id"),
        "context_length": model.get("context_length"),
        "requests": int(stats.get("requests_total", 0)),
        "running": int(stats.get("requests_running", 0)),
        "most_running": int(now.get("most_running") or 0),
        "waiting": int(stats.get("requests_waiting", 0)),
        "most_waiting": int(now.get("most_waiting") or 0),
        "blocks_used": int(stats.get("blocks_used", 0)),
        "blocks_cached": int(stats.get("blocks_cached", 0)),
        "blocks": int(stats.get("blocks", 0)),
        "cached_share": round(stats.get("cached_tokens_total", 0.0) / read, 4) if read else 0.0,
        "prompt_tokens_per_second": round(prompts / seconds, 1) if seconds > 0 else 0.0,
        "generated_tokens_per_second": round(made / seconds, 1) if seconds > 0 else 0.0,
        "packed": round(stats.get("weights_packed_ratio", 1.0), 4),
        "ranks": [_rank_facts(old, new, seconds) for old, new in _pairs(before["ranks"], now["ranks"])],
    }


def table(before: Event, now: Event) -> "Table":
    """Returns the figures as a table: a line for the server, and one for each rank."""
    from rich.table import Table

    found = facts(before, now)
    grid = Table.grid(padding=(0, 2))
    head = Table(box=None, pad_edge=False, header_style="bold")
    cells = {
        "model": one_line(found["model"] or "?", 40),
        "state": one_line(found["state"] or "?", 20)
        + ("" if found["packed"] >= 1 else f", packing {found['packed']:.0%}"),
        "running": f"{found['running']} of {found['most_running']}",
        "waiting": f"{found['waiting']} of {found['most_waiting']}",
        "cache": f"{_share(found['blocks_used'], found['blocks'])} used",
        "reused": f"{found['cached_share']:.0%}",
        "prompts": f"{found['prompt_tokens_per_second']:.0f} tok/s",
        "answers": f"{found['generated_tokens_per_second']:.1f} tok/s",
        "requests": str(found["requests"]),
    }
    for name in cells:
        head.add_column(name)
    head.add_row(*cells.values())
    grid.add_row(head)
    ranks = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "host", "cpus", "threads", "weights", "cache", "steps/s", "ms a step", "waiting", "read"):
        ranks.add_column(name, justify="left" if name in ("host", "cpus") else "right")
    for rank in found["ranks"]:
        ranks.add_row(*_rank_cells(rank))
    if found["ranks"]:
        grid.add_row(ranks)
    return grid


def _rank_facts(before: Event, now: Event, seconds: float) -> dict[str, Any]:
    steps, busy, wait, decode, read = (
        _since(before, now, name)
        for name in (
            "steps_total", "step_seconds_total", "wait_seconds_total", "decode_seconds_total",
            "decode_read_bytes_total",
        )
    )  # fmt: skip
    names = ("rank", "threads", "weights_bytes", "cache_bytes", "bandwidth")
    numbers = {name: int(float(now.get(name, 0))) for name in names}
    texts = {name: one_line(now.get(name, "?"), 40) for name in ("host", "cpus")}
    return {
        **numbers,
        **texts,
        "steps_per_second": round(steps / seconds, 1) if seconds > 0 else 0.0,
        "seconds_per_step": busy / steps if steps > 0 else 0.0,
        "wait_share": wait / busy if busy > 0 else 0.0,
        "decode_bytes_per_second": read / decode if decode > 0 else 0.0,
    }


def _rank_cells(rank: Mapping[str, Any]) -> list[str]:
    limit = rank["bandwidth"]
    read = f"{rank['decode_bytes_per_second'] / 1e9:.1f} of {limit / 1e9:.0f} GB/s" if limit else "–"
    return [
        str(rank["rank"]), rank["host"], rank["cpus"], str(rank["threads"]), f"{rank['weights_bytes'] / 1e9:.2f} GB",
        f"{rank['cache_bytes'] / 1e9:.2f} GB", f"{rank['steps_per_second']:.0f}",
        f"{rank['seconds_per_step'] * 1e3:.2f}",
        f"{rank['wait_share']:.0%}", read,
    ]  # fmt: skip


def _pairs(before: Sequence[Event], now: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Each rank's state in both events. A rank that is new has the same state twice."""
    old = {rank.get("rank"): rank for rank in before}
    return [(old.get(rank.get("rank"), rank), rank) for rank in now]


def _since(before: Event, now: Event, name: str) -> float:
    return max(0.0, float(now.get(name, 0.0)) - float(before.get(name, 0.0)))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
