"""The load of a simulation: requests with times of arrival, lengths, and shared prefixes.

Requests arrive at random (Poisson), from a file, or from clients that wait for an answer before their next request. A
file has one request per line. It is a CSV with a header: `arrival` in seconds, `prompt` and `output` in tokens, and for
prompts with a common beginning `prefix`, a name, and `prefix_tokens`. It may also have the columns of Azure's public
traces (TIMESTAMP, ContextTokens, GeneratedTokens).
"""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

import numpy as np

from ckdist.errors import ConfigError
from ckdist.plan.lengths import Lengths
from ckdist.text_file import read_text_file

MOST_REQUESTS = 5_000_000
MAX_TRACE_BYTES = 1 << 30
AZURE = {"TIMESTAMP": "arrival", "ContextTokens": "prompt", "GeneratedTokens": "output"}
NO_PREFIX = -1


Row: TypeAlias = tuple[float, int, int, int, int]
Requests: TypeAlias = np.recarray  # of REQUEST, by time of arrival
REQUEST = np.dtype([
    ("arrival", np.float64),  # seconds
    ("prompt", np.int64),  # tokens, at least 1
    ("output", np.int64),  # tokens, at least 1
    ("prefix", np.int64),  # number of the prefix that begins the prompt, or NO_PREFIX
    ("prefix_tokens", np.int64),  # tokens of that prefix
])  # fmt: skip


@dataclass(frozen=True)
class RequestKind:
    """The distribution of requests."""

    prompt: Lengths  # tokens after the prefix
    output: Lengths
    prefix_tokens: int = 0  # tokens of each prefix; 0: prompts have none
    prefixes: int = 1  # number of different prefixes, all equally likely

    def draw(self, rng: np.random.Generator, arrival: np.ndarray) -> Requests:
        """Draws requests for the times `arrival`, float64 (requests,)."""
        count = len(arrival)
        found = np.recarray(count, REQUEST)
        found.arrival = arrival
        found.prefix_tokens = self.prefix_tokens
        found.prefix = rng.integers(0, self.prefixes, count) if self.prefix_tokens else NO_PREFIX
        found.prompt = self.prompt.draw(rng, count) + self.prefix_tokens
        found.output = self.output.draw(rng, count)
        return found


def poisson(rng: np.random.Generator, kind: RequestKind, rate: float, seconds: float) -> Requests:
    """Draws requests that arrive independently, on average `rate` per second, for `seconds`.

    Raises ConfigError for more than MOST_REQUESTS.
    """
    check_count(rate * seconds, f"--rate {rate:g} for --duration {seconds:g}")
    count = int(rng.poisson(rate * seconds))
    return kind.draw(rng, np.sort(rng.uniform(0.0, seconds, count)))  # given their number, arrivals are uniform


def check_count(requests: float, what: str) -> None:
    """Raises ConfigError for more than MOST_REQUESTS, with the name of their source."""
    if requests > MOST_REQUESTS:
        raise ConfigError(f"{what} makes {requests:.3g} requests, of at most {MOST_REQUESTS}: shorten it")


def read_trace(path: str, seconds: float | None = None) -> Requests:
    """Reads the requests of a file. Their times begin at 0; only those before `seconds` are kept.

    Raises ConfigError if the file cannot be used.
    """
    lines = csv.DictReader(io.StringIO(read_text_file(path, f"--trace {path[:200]}", MAX_TRACE_BYTES)))
    try:
        rows = _rows(lines, path)
    except (csv.Error, ValueError, OverflowError) as error:
        raise ConfigError(f"--trace {path}, line {lines.line_num}: {error}") from None
    if not rows:
        raise ConfigError(f"--trace {path} has no request")
    requests = np.array(rows, REQUEST)
    requests = requests[np.argsort(requests["arrival"], kind="stable")]
    requests["arrival"] -= requests["arrival"][0]
    return requests[requests["arrival"] < (math.inf if seconds is None else seconds)].view(np.recarray)


def _rows(lines: "csv.DictReader[str]", path: str) -> list[Row]:
    names = {AZURE.get(name or "", name): name for name in lines.fieldnames or ()}
    lacking = [name for name in ("arrival", "prompt", "output") if name not in names]
    if lacking:
        raise ConfigError(f"--trace {path} has no column {lacking[0]}: its header needs arrival, prompt and output")
    prefixes: dict[str, int] = {}
    rows: list[Row] = []
    for row in lines:
        rows.append(_request({ours: row[name] or "" for ours, name in names.items()}, prefixes))
        check_count(len(rows), f"--trace {path}")
    return rows


def _request(row: Mapping[str, str], prefixes: dict[str, int]) -> Row:
    """Parses the request of one line. Raises ValueError with the reason."""
    text = row["arrival"]
    try:
        arrival = float(text)
    except ValueError:
        arrival = datetime.fromisoformat(text[:26]).timestamp()  # Python reads six of the seven digits of a second
    prompt, output = (_whole(row[name], name) for name in ("prompt", "output"))
    tokens = _whole(row.get("prefix_tokens") or "0", "prefix_tokens")
    if not math.isfinite(arrival) or abs(arrival) > 1e12:
        raise ValueError(f"an arrival of {text[:30]} is out of range")
    if min(prompt, output) < 0 or max(prompt, output) > 1 << 24:
        raise ValueError(f"a prompt of {prompt} and an output of {output} tokens are out of range")
    if not 0 <= tokens <= prompt:
        raise ValueError(f"a prefix of {tokens} tokens does not fit into a prompt of {prompt}")
    prefix = prefixes.setdefault(row.get("prefix") or "", len(prefixes)) if tokens else NO_PREFIX
    return arrival, max(1, prompt), max(1, output), prefix, tokens


def _whole(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text[:30]!r}; it must be a whole number") from None
