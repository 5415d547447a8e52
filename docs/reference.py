"""Writes the reference while the site is built: every flag, field, path, metric, error and variable, from the code.

A hook of mkdocs (`hooks` in mkdocs.yml). `pages()` alone is enough for a test.
"""

import ast
import inspect
import pathlib
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from ckdist import errors
from ckdist.cli.arguments import parser_for
from ckdist.cli.main import COMMANDS, settings_class
from ckdist.engine.expert_load import dispatch_stats, expert_stats
from ckdist.engine.llm import LLM
from ckdist.serve.metrics import Metrics
from ckdist.serve.paths import (
    absent,
    conversations,
    file_batches,
    llama_server,
    message_batches,
    ollama,
    page,
    plain,
    slot_actions,
    status,
    stored_responses,
)
from ckdist.serve.problems import TYPES
from ckdist.serve.requests.field_table import EVERY, HARMLESS, HONOURED, REFUSED, Harmless, Honoured, Neutral
from ckdist.serve.requests.params import MAX_TOKENS_NAMES
from ckdist.serve.requests.sampling_fields import NUMBERS
from ckdist.train.config import TrainConfig

PACKAGE = pathlib.Path(errors.__file__).parent
HEAD = "<!-- Written by docs/reference.py from the code. -->\n\n"

# Functions that read the field that their second argument names.
READERS = {"_schema": "object, string", "_text": "string", "_choices": "list", "_tools": "list"}
# The path of each kind of request.
FACES = {
    "chat": "chat/completions",
    "completion": "completions",
    "llama_completion": "/completion",
    "embedding": "embeddings",
    "llama_embedding": "/embedding",
    "response": "responses",
    "count_tokens": "messages/count_tokens",
    "apply_template": "/apply-template",
    **{name: name for name in ("messages", "rerank")},
    **{name: f"/{name}" for name in ("infill", "score", "tokenize", "detokenize")},
}
# Variables of the environment that the code reads; a test holds these against the code.
VARIABLES = {
    "CKDIST_API_KEY": "keys that clients of `ckdist serve` must send, separated by commas, if there is no `--api-key`",
    "CKDIST_CONNECTIONS": "set by `ckdist launch`: the sockets that a rank has inherited",
    "CKDIST_DRAINED": "set by `launch/drained`, under which SIGTERM to mpirun drains",
    "CKDIST_ENGINE_DIRECTORY": "set by a server with several models: the folder of an engine's socket",
    "CKDIST_ENGINE_PARENT": "set by such a server: the process that the engine ends with",
    "CKDIST_ENGINE_TURNS": "set by such a server: FILE:NUMBER, where engines that share cores take turns",
    "CKDIST_INTERFACE": "network interface that carries the ranks, by its name, where a host has several",
    "CKDIST_ISA": "level of instructions to use, as `avx2`; one that the CPU lacks is an error",
    "CKDIST_JOB_BEGAN_WITH": "set by `ckdist launch`: the number of ranks that a job began with",
    "CKDIST_JOB_SECRET_FILE": "file with the secret that ranks prove without MPI; only its owner may read it",
    "CKDIST_KEPT_ARENAS": "set by a process that restarts ranks: the sockets that hold packed weights",
    "CKDIST_LIBRARY": "another native library, for tests",
    "CKDIST_MODELS": "folder of the models that were fetched (default: in the user's data folder)",
    "CKDIST_START_TIMEOUT": "seconds in which all ranks must have come together without MPI",
    "CKDIST_WARM": "set by a launcher: the connection of the process that forks ranks",
    "MASTER_ADDR": "host of rank 0, for a start without MPI",
    "MASTER_PORT": "port of rank 0",
    "NO_COLOR": "any value switches colours off",
    "NOTIFY_SOCKET": "set by systemd for `Type=notify`: where `ckdist serve` says that it is ready",
    "RANK": "number of this rank, from 0",
    "WORLD_SIZE": "number of ranks",
    "XDG_CACHE_HOME": "folder of what was measured once (default: `~/.cache`)",
    "XDG_RUNTIME_DIR": "folder of the same where the home cannot be written (default: the temporary folder)",
    "XDG_STATE_HOME": "folder of the history of `ckdist chat` (default: `~/.local/state`)",
}


def cell(text: object) -> str:
    """`text` inside a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def table(names: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """A Markdown table; cells are given ready."""
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def code(text: object) -> str:
    """`text` as code, nothing for an empty one."""
    shown = str(text).replace("|", "\\|").replace("\n", "\\n")
    return f"`{shown}`" if shown else ""


def default_of(item: Any) -> str:
    """A field's default as a user writes it."""
    value = item.default if item.default is not MISSING else item.default_factory()
    if value in (None, "", (), {}) or value is False:
        return ""
    return code(",".join(map(str, value)) if isinstance(value, tuple) else value)


def range_of(metadata: Any) -> str:
    """What a field may be."""
    if metadata.get("choices"):
        return ", ".join(code(choice) for choice in metadata["choices"])
    low, high = metadata.get("low"), metadata.get("high")
    return f"{number(low)} to {number(high)}" if low is not None and high is not None else ""


def number(value: float) -> str:
    """A bound as a person writes it."""
    if value < 0:
        return f"-{number(-value)}"
    if isinstance(value, int) and value >= 1 << 16:
        power = value.bit_length() - (0 if value & (value + 1) == 0 else 1)
        exact = {1 << power: f"2^{power}", (1 << power) - 1: f"2^{power} - 1"}
        return exact.get(value, str(value))
    return f"{value:g}"


def commands() -> str:
    """Every command with its flags."""
    text = "# Commands and flags\n\nExit codes: 0 done, 1 something broke while running, 2 the user's mistake, "
    text += "130 interrupted, 141 standard output was closed.\n"
    for name, (_, what) in COMMANDS.items():
        text += f"\n## ckdist {name} {{ #{name} }}\n\n{cell(what[0].upper() + what[1:])}.\n\n"
        rows = []
        for item in fields(settings_class(name)):
            flags = ", ".join(code(flag) for flag in item.metadata["flags"])
            rows.append((flags, default_of(item), range_of(item.metadata), cell(item.metadata["help"])))
        parser_for(settings_class(name), f"ckdist {name}")  # the same parser that reads the command line
        text += table(("flag", "default", "range", "meaning"), rows)
    return text


def training() -> str:
    """Every field of a training's configuration."""
    rows = [
        (code(item.name), default_of(item), range_of(item.metadata), cell(item.metadata["help"]))
        for item in fields(TrainConfig)
    ]
    text = "# Fields of a training\n\nThe fields of the TOML file that `ckdist train` reads. "
    return text + "`--set FIELD=VALUE` changes one.\n\n" + table(("field", "default", "range", "meaning"), rows)


def names_in(node: ast.expr, constants: dict[str, Any]) -> tuple[str, ...]:
    """The names of fields that an expression gives: a string, a tuple of them, or a constant of its module."""
    if isinstance(node, ast.Name):
        value = constants.get(node.id, ())
    else:
        try:
            value = ast.literal_eval(node)
        except ValueError:
            return ()
    found = (value,) if isinstance(value, str) else value
    return tuple(name for name in found if isinstance(name, str)) if isinstance(found, tuple) else ()


def read_fields() -> Iterator[tuple[str, str, str]]:
    """Names, type and file of every field that the readers of requests ask for."""
    kinds = {
        "text": "string",
        "switch": "boolean",
        "inner": "object",
        "integer": "integer",
        "number": "number",
        "token_ids": "token ids",
    }
    for path in sorted((PACKAGE / "serve" / "requests").glob("*.py")):
        tree = ast.parse(path.read_text())
        constants: dict[str, Any] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                try:
                    constants[node.targets[0].id] = ast.literal_eval(node.value)
                except ValueError:
                    continue
        for node in ast.walk(tree):
            called = node.func if isinstance(node, ast.Call) and node.args else None
            if isinstance(node, ast.Call) and isinstance(called, ast.Name) and called.id in READERS and node.args[1:]:
                yield from ((code(name), READERS[called.id], path.stem) for name in names_in(node.args[1], constants))
            if not isinstance(called, ast.Attribute) or called.attr not in {*kinds, "value"}:
                continue
            if not isinstance(called.value, ast.Name) or "field" not in called.value.id:
                continue
            names = names_in(node.args[0], constants)
            if names:
                given = [a.id for a in node.args[1:] if isinstance(a, ast.Name)]
                kind = kinds.get(called.attr) or ", ".join({"str": "string", "dict": "object"}.get(g, g) for g in given)
                yield ", ".join(code(name) for name in names), kind, path.stem
    yield ", ".join(code(name) for name in MAX_TOKENS_NAMES), "integer", "asked"
    for item in NUMBERS:
        kind = "integer" if item.metadata["kind"] is int else "number"
        names = ", ".join(code(name) for name in (item.name, *item.metadata["also"]))
        yield names, f"{kind}, {range_of(item.metadata)}", "sampling"


def where(faces: frozenset[str]) -> str:
    """The paths on which a field is known."""
    return "all" if faces == EVERY else ", ".join(sorted(FACES[face] for face in faces))


def requests() -> str:
    """Every field of a request: honoured, refused unless neutral, or without effect."""
    types = {name: kind for names, kind, _ in read_fields() for name in names.split(", ")}
    text = "# Fields of requests\n\nA name with a dot is a field of an object. Of several names of one thing the first "
    text += "that is given counts.\n\n## Honoured\n\n"
    honoured = [
        (code(name), types.get(code(name), ""), where(row.faces), row.rule.by)
        for row in HONOURED
        for name in row.names
        if isinstance(row.rule, Honoured)
    ]
    text += table(("field", "type", "paths", "read by"), sorted(honoured))
    text += "\n## Refused unless neutral\n\nThe answer would be another one, so any other value is a 400.\n\n"
    refused = [
        (
            code(name),
            ", ".join(code(repr(v)) for v in row.rule.values) or "null",
            where(row.faces),
            cell(row.rule.remedy),
        )
        for row in REFUSED
        for name in row.names
        if isinstance(row.rule, Neutral)
    ]
    text += table(("field", "values that are taken", "paths", "instead"), sorted(refused))
    text += "\n## Without effect\n\nThe answer is the same, whatever they hold.\n\n"
    harmless = [
        (code(name), where(row.faces), cell(row.rule.reason))
        for row in HARMLESS
        for name in row.names
        if isinstance(row.rule, Harmless)
    ]
    text += table(("field", "paths", "why"), sorted(harmless))
    return text + "\nAny other name is ignored and logged once; with `--strict-fields` it is a 400.\n"


def endpoints() -> str:
    """Every path of the server."""
    groups = {
        "Texts, vectors and tokens": plain,
        "Settings": llama_server,
        "Ollama's": ollama,
        "Responses": stored_responses,
        "Conversations": conversations,
        "Prompts ahead, and saved slots": slot_actions,
        "Files and batches": file_batches,
        "Anthropic's batches": message_batches,
        "Status and models": status,
        "The page": page,
    }
    text = "# Paths\n\nEvery path is there with and without `/v1`, and with a slash at its end. GET has HEAD too.\n"
    for title, module in groups.items():
        rows = []
        for path in module.PATHS:
            told = path.about or inspect.getdoc(path.handle)
            rows.append(
                (code(path.name), ", ".join(path.methods), cell(told or path.handle.__name__.replace("_", " ")))
            )
        text += f"\n## {title}\n\n" + table(("path", "methods", "what"), rows)
    text += "\n## Absent\n\nThese are a 404 that says why.\n\n"
    return text + table(("path", "why"), [(code(name), cell(why)) for name, why in absent.NAMES.items()])


def metrics() -> str:
    """Every metric, read from a registry with the numbers of a real engine, and those of models with experts."""
    with LLM(threads=1, ctx_size=256, repack="off") as llm:
        stats = llm.engine.stats() | expert_stats({0: np.ones(1)}) | dispatch_stats(0, 0)
    registry = Metrics("model", lambda: "ready", lambda: 0, lambda: stats)
    rows: dict[str, tuple[str, str, str]] = {}
    for line in registry.render().decode().splitlines():
        words = line.split(" ", 3)
        if line.startswith("# HELP") and not words[2].endswith("_created"):
            rows[words[2]] = (code(words[2]), "", cell(words[3]))
        elif line.startswith("# TYPE") and words[2] in rows:
            rows[words[2]] = (rows[words[2]][0], words[3], rows[words[2]][2])
    text = (
        "# Metrics\n\n`GET /metrics`, in Prometheus' text format. Histograms have `_bucket`, `_sum` and `_count`.\n\n"
    )
    return text + table(("metric", "type", "meaning"), sorted(rows.values()))


def all_errors() -> str:
    """The tree of exceptions, and the HTTP statuses with OpenAI's words for them."""
    text = "# Errors\n\n## Exceptions\n\nAll are in `ckdist.errors`. Every message is one line: what was wrong, both "
    text += "numbers, and the remedy.\n\n"
    rows = []
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.CkdistError):
            user = issubclass(kind, errors.UserError)
            told = (inspect.getdoc(kind) or "").split("\n\n")[0]
            exit_code, http = ("2", "4xx") if user else ("1", "5xx")
            rows.append((code(name), code(kind.__mro__[1].__name__), exit_code, http, cell(told)))
    text += table(("exception", "is a", "exit code", "HTTP", "meaning"), rows)
    text += (
        "\n## Answers that are not 200\n\n`error.type` is `invalid_request_error` for other 4xx, `server_error` for "
    )
    text += "other 5xx. `error.param` names the field.\n\n"
    text += table(("status", "error.type"), [(status, code(kind)) for status, kind in TYPES.items()])
    text += "\n## Messages of the server\n\nBraces stand for what the message names.\n\n"
    return text + table(("status", "message"), sorted(problems()))


def problems() -> Iterator[tuple[int, str]]:
    """Status and message of every `Problem` that the server makes with a text of its own."""
    for path in sorted((PACKAGE / "serve").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "Problem":
                continue
            if len(node.args) < 2 or not isinstance(node.args[0], ast.Constant):
                continue
            if isinstance(node.args[1], ast.Constant | ast.JoinedStr):
                words = re.sub(r"\{[^{}]*\}", "{…}", ast.unparse(node.args[1]).lstrip("f").strip("'\""))
                yield int(node.args[0].value), cell(words)


def environment() -> str:
    """Every variable of the environment."""
    text = "# Environment\n\nA launcher's own variables (Open MPI, MPICH, torchrun) are read as well.\n\n"
    return text + table(("variable", "meaning"), [(code(name), cell(told)) for name, told in VARIABLES.items()])


PAGES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "endpoints": endpoints,
    "requests": requests,
    "metrics": metrics,
    "errors": all_errors,
    "training": training,
    "environment": environment,
}


def pages() -> dict[str, str]:
    """The text of every page by its path in the site."""
    return {f"reference/{name}.md": HEAD + write() for name, write in PAGES.items()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages to the site. Called by mkdocs."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
