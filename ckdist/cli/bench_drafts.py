"""`ckdist bench drafts`: decode of three texts without and with drafts, in turn."""

import dataclasses
import json
import statistics
import time
from typing import Any, NamedTuple

from ckdist.cli.rows import write_rows
from ckdist.cli.session import model_session
from ckdist.config.bench_config import BenchConfig
from ckdist.engine.engine import Engine
from ckdist.engine.model_engine import make_engine
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import EngineError
from ckdist.progress import ProgressBar
from ckdist.tokens.tokenizer import Tokenizer

CODE = """class Counts:
    def __init__(self, limits):
        self.limits = sorted(limits)
        self.counts = [0] * (len(limits) + 1)
        self.total = 0

    def add(self, value):
        place = sum(limit < value for limit in self.limits)
        self.counts[place] += 1
        self.total += value

    def mean(self):
        return self.total / max(1, sum(self.counts))
"""
CITIES = "Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Prague", "Lisbon", "Oslo"
QUESTION = "Tell me about the history of the city of Rome and why people like to travel there."


def prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """The measured prompts: a file that is written again, calls of a tool, and a question."""
    calls = [json.dumps({"name": "weather", "arguments": {"city": city, "days": 3}}) for city in CITIES[:3]]
    tools = f"Tool calls, one per line, for {', '.join(CITIES)}:\n" + "\n".join(calls) + "\n"
    has_chats = tokenizer.chat_template is not None
    return {
        "code": tokenizer.encode(f"{CODE}\n# The same with other names:\n{CODE[:90].replace('Counts', 'Tally')}"),
        "tools": tokenizer.encode(tools),
        "chat": tokenizer.chat_tokens([{"role": "user", "content": QUESTION}])
        if has_chats
        else tokenizer.encode(QUESTION),
    }


class Decoded(NamedTuple):
    """Answers of sequences that ran together."""

    tokens: list[list[int]]
    rate: float  # tokens per second, after the first of each
    seconds: float


class DraftBench:
    """Measures an engine that has no other user."""

    def __init__(self, engine: Engine, config: BenchConfig) -> None:
        self.engine, self.config = engine, config

    def decode(self, prompt: list[int], count: int, sequences: int, spec: str) -> Decoded:
        """Decodes `count` tokens of each sequence at temperature 0. Nothing of earlier ones is used."""
        engine, answers = self.engine, [list[int]() for _ in range(sequences)]
        params = SamplingParams(count, temperature=0.0, spec=spec, ignore_eos=True)
        for place in range(sequences):
            engine.add(place, prompt, params, tenant=None)
        begin, before = 0.0, 0
        while engine.has_work:
            for output in engine.step():
                answers[int(str(output.id))] += output.tokens
            if not begin and all(answers):
                begin, before = time.perf_counter(), sum(map(len, answers))
        seconds = time.perf_counter() - begin
        return Decoded(answers, (sum(map(len, answers)) - before) / seconds, seconds)

    def pair(self, name: str, prompt: list[int], count: int, sequences: int, turn: int) -> tuple[Decoded, Decoded]:
        """Decodes without and with drafts. Their order depends on `turn`."""
        specs = ("off", self.config.spec) if turn % 2 else (self.config.spec, "off")
        answers = {spec: self.decode(prompt, count, sequences, spec) for spec in specs}
        plain, drafted = answers["off"], answers[self.config.spec]
        if plain.tokens != drafted.tokens:
            raise EngineError(f"drafts changed the answer to {name}, which is an error of ckdist: please report it")
        return plain, drafted

    def row(self, name: str, prompt: list[int], count: int, sequences: int) -> dict[str, Any]:
        """Measures without and with drafts, after one warm-up of both."""
        self.pair(name, prompt, count, sequences, 0)
        assert self.engine.drafting is not None  # after a request
        gain = self.engine.drafting.gain
        begin = gain.drafted, gain.accepted, gain.steps, gain.predicted
        turns = range(1, self.config.repetitions + 1)
        pairs = [self.pair(name, prompt, count, sequences, turn) for turn in turns]
        seconds = sum(drafted.seconds for _, drafted in pairs)
        return {
            "text": name,
            "n_gen": count,
            "n_parallel": sequences,
            "spec": self.config.spec,
            "ts_off": statistics.median(plain.rate for plain, _ in pairs),
            "ts_drafts": statistics.median(drafted.rate for _, drafted in pairs),
            "predicted_gain": 1 + (gain.predicted - begin[3]) / seconds,
            "measured_gain": statistics.median(drafted.rate / plain.rate for plain, drafted in pairs),
            "drafted": gain.drafted - begin[0],
            "accepted": gain.accepted - begin[1],
            "steps": gain.steps - begin[2],
            "samples_off": [plain.rate for plain, _ in pairs],
            "samples_drafts": [drafted.rate for _, drafted in pairs],
        }


def gist(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns of the table for people."""
    return {
        "test": f"{row['text']} tg{row['n_gen']}" + f" x {row['n_parallel']}" * (row["n_parallel"] > 1),
        "spec": row["spec"],
        "t/s off": f"{row['ts_off']:.1f}",
        "t/s": f"{row['ts_drafts']:.1f}",
        "gain predicted": f"{row['predicted_gain']:.2f}",
        "gain measured": f"{row['measured_gain']:.2f}",
        "drafted": str(row["drafted"]),
        "accepted": str(row["accepted"]),
    }


def run(config: BenchConfig) -> int:
    """Measures drafts. Rank 0 prints the rows. Returns 0."""
    config = dataclasses.replace(config, parallel=max(config.parallel, *config.n_parallel))
    with model_session(config) as model:
        if model is None:
            return 0
        engine, tokenizer = make_engine(model, config)
        bench, texts = DraftBench(engine, config), prompts(tokenizer)
        sizes = [(count, sequences) for count in config.n_gen for sequences in config.n_parallel]
        with ProgressBar(len(texts) * len(sizes), "row", "measuring") as bar:
            rows = list[dict[str, Any]]()
            for name, prompt in texts.items():
                for count, sequences in sizes:
                    rows.append(bench.row(name, prompt, count, sequences))
                    bar.update(1)
        write_rows([gist(row) for row in rows] if config.output == "md" else rows, config.output)
    return 0
