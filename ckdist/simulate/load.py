"""What clients ask for: requests with times of arrival, lengths, and prefixes that they share.

Requests arrive at random (Poisson), from a file, or from clients of whom each waits for its answer before it asks
again. A file has one request a line: CSV with a head line (`arrival` in seconds, `prompt` and `output` in tokens, and
where prompts begin alike `prefix`, a name, and `prefix_tokens`), or the columns of Azure's public traces
(TIMESTAMP, ContextTokens, GeneratedTokens).
"""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from ckdist.errors import ConfigError
from ckdist.simulate.lengths import Lengths
from ckdist.text_file import read_text_file

MOST_REQUESTS = 5_000_000
MAX_TRACE_BYTES = 1 << 30
AZURE = {"TIMESTAMP": "arrival", "ContextTokens": "prompt", "GeneratedTokens": "output"}
NO_PREFIX = -1


@dataclass(frozen=True)
class Requests:
    """Arrays of one length, by time of arrival: seconds; tokens of prompt and output, at least 1 of each; and the
    number of the prefix with which a prompt begins (NO_PREFIX: none), and its tokens.
    """

    arrival: np.ndarray  # float64 (requests,)
    prompt: np.ndarray  # int64 (requests,)
    output: np.ndarray  # int64 (requests,)
    prefix: np.ndarray  # int64 (requests,)
    prefix_tokens: np.ndarray  # int64 (requests,)

    def __len__(self) -> int:
        return len(self.arrival)

    def where(self, chosen: np.ndarray) -> "Requests":
        """Those that a mask or indices choose."""
        return Requests(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class RequestKind:
    """What one request is like: the tokens behind its prefix, its output, and which of `prefixes` texts of
    `prefix_tokens` it begins with, each as likely.
    """

    prompt: Lengths
    output: Lengths
    prefix_tokens: int = 0
    prefixes: int = 1

    def draw(self, rng: np.random.Generator, arrival: np.ndarray) -> Requests:
        """Requests that arrive at `arrival`, float64 (requests,)."""
        count = len(arrival)
        prefix = rng.integers(0, self.prefixes, count) if self.prefix_tokens else np.full(count, NO_PREFIX)
        prompt = self.prompt.draw(rng, count) + self.prefix_tokens
        tokens = np.full(count, self.prefix_tokens)
        return Requests(arrival, prompt, self.output.draw(rng, count), prefix, tokens)


def poisson(rng: np.random.Generator, kind: RequestKind, rate: float, seconds: float) -> Requests:
    """Requests that arrive independently of one another, `rate` a second on the average, for so many seconds.

    ConfigError for more than MOST_REQUESTS.
    """
    check_count(rate * seconds, f"--rate {rate:g} for --duration {seconds:g}")
    count = int(rng.poisson(rate * seconds))
    return kind.draw(rng, np.sort(rng.uniform(0.0, seconds, count)))  # of a Poisson process with so many arrivals


def check_count(requests: float, what: str) -> None:
    """ConfigError where these are more than can be simulated."""
    if requests > MOST_REQUESTS:
        raise ConfigError(f"{what} makes {requests:.3g} requests, of at most {MOST_REQUESTS}: shorten it")


def read_trace(path: str, seconds: float | None = None) -> Requests:
    """The requests of a file, of the first so many seconds, from 0 on. ConfigError where it cannot be used."""
    lines = csv.DictReader(io.StringIO(read_text_file(path, f"--trace {path[:200]}", MAX_TRACE_BYTES)))
    names = {AZURE.get(name or "", name): name for name in lines.fieldnames or ()}
    lacking = [name for name in ("arrival", "prompt", "output") if name not in names]
    if lacking:
        raise ConfigError(f"--trace {path} has no column {lacking[0]}: its head line needs arrival, prompt and output")
    prefixes: dict[str, int] = {}
    rows: list[tuple[float, int, int, int, int]] = []
    for row in lines:
        try:
            rows.append(_request({ours: row[name] or "" for ours, name in names.items()}, prefixes))
        except (ValueError, OverflowError, TypeError) as error:
            raise ConfigError(f"--trace {path}, line {lines.line_num}: {error}") from None
        check_count(len(rows), f"--trace {path}")
    if not rows:
        raise ConfigError(f"--trace {path} has no request")
    arrival, *others = (np.array(column) for column in zip(*rows, strict=True))
    order = np.argsort(arrival, kind="stable")
    requests = Requests(arrival - arrival[order[0]], *others).where(order)
    return requests if seconds is None else requests.where(requests.arrival < seconds)


def _request(row: Mapping[str, str], prefixes: dict[str, int]) -> tuple[float, int, int, int, int]:
    """A line's request; ValueError says what is wrong with it."""
    text = row["arrival"]
    try:
        arrival = float(text)
    except ValueError:
        arrival = datetime.fromisoformat(text[:26]).timestamp()  # of seven digits of a second Python takes six
    prompt, output = (_whole(row[name], name) for name in ("prompt", "output"))
    tokens = _whole(row.get("prefix_tokens") or "0", "prefix_tokens")
    if not math.isfinite(arrival) or abs(arrival) > 1e12:
        raise ValueError(f"an arrival of {text[:30]}")
    if min(prompt, output) < 0 or max(prompt, output) > 1 << 24:
        raise ValueError(f"a prompt of {prompt} and an output of {output} tokens")
    if not 0 <= tokens <= prompt:
        raise ValueError(f"a prefix of {tokens} tokens in a prompt of {prompt}")
    prefix = prefixes.setdefault(row.get("prefix") or "", len(prefixes)) if tokens else NO_PREFIX
    return arrival, max(1, prompt), max(1, output), prefix, tokens


def _whole(text: str, name: str) -> int:
    """The number of a column; ValueError says what it is instead."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text[:30]!r}, and must be a whole number") from None


__all__ = ["NO_PREFIX", "RequestKind", "Requests", "check_count", "poisson", "read_trace"]
