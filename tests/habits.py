"""Counts habits that the project wants, and holds them against the record: `make lint`.

    python tests/habits.py            a table of what is counted: first on record, last on record, now
    python tests/habits.py --check    also fails where a count is above the last on record
    python tests/habits.py --update   writes the counts of today as the last on record
    ... --quick                       leaves out the tools that take longer than a second

The record is tests/habits.json. A count whose goal is 0 may fall and never rise, so a merge cannot bring a new finding.
"""

import argparse
import ast
import json
import pathlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).parent.parent
RECORD = ROOT / "tests" / "habits.json"
COLUMNS = 120
FUNCTION_LINES = 60
GENERATED = ("constraints.txt",)  # `make lock` writes each requirement on one line, however long
TEXT = (
    ".py",
    ".cpp",
    ".h",
    ".md",
    ".toml",
    ".yml",
    ".yaml",
    ".txt",
    ".mk",
    ".cmake",
    ".sh",
    ".js",
    ".css",
    ".html",
    "",
)
DATA = ("tests/golden/", "tests/native/golden/", "LICENSE", "ckdist/models/bundled/")
NATIVE = (".cpp", ".h")

# Words that mean something in this project alone; beside each the field's. Where the word is also plain English, the
# pattern takes the private sense alone: ranks *cut* tensors and pass messages over *wires*, but an answer may be cut
# short, a request has what it asked for, and bytes go over the wire. `--reorganize` is the former name of a
# public flag, and wire$i a device that the virtual machine's script makes.
SHARDED = r"tokens?|tensors?|heads?|ffn|matri(?:x|ces)|layers?|dim(?:ension)?s?|batch|columns|work|weights"
PRIVATE_WORDS = {
    r"[Mm]eeting": "shared-memory rendezvous",
    r"[Pp]arcels?": "eager message",
    r"[Pp]ulse": "heartbeat, failure detector",
    r"StartLine|start_line\b|START_LINE": "bootstrap connection",
    r"\bReach\b|\breach_|\bfelt\b": "cache distance, probe",
    r"\btwins?\b": "peer of the same local rank",
    r"\bWires?\b|(?<!the )\bwires?\b(?! format|\$)|\bPipes\b": "transport",
    r"[Mm]overs?\b": "copy engine",
    rf"\b(?:{SHARDED}) (?:is |are |was |were |be |to be |cannot be )?cut\b"
    r"|\bcuts? (?:over|by|across|evenly)\b|\bcuts (?:tokens|tensors|dimensions)\b"
    r"|\bdef cut\b|(?<![.\w])cut\(|\bimport (?:\w+, )*cut\b|\.cuts\b|\bcuts:": "shard",
    r"\bforetold\b|\bforetells?\b": "predicted",
    r"\bturned\b(?! (?:off|on|down|into|away|out|to|over|back)\b)|_turned\b|\bturned_": "transposed",
    r"\bAsked\b[(:\[.]": "request parameters",
    r"\bRuler\b": "offset decoder",
    r"(?<!--)(?<!\")[Rr]eorgani[sz]e": "repack in the background",
    r"\b[Ww]hoever\b": "name the subject",
}


def tracked() -> list[str]:
    """The repository's text files by their paths from its root; data that others made is left out."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return [n for n in names if pathlib.Path(n).suffix in TEXT and not n.startswith(DATA) and (ROOT / n).is_file()]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(errors="replace")


def long_lines(names: list[str]) -> int:
    """Lines over the limit, but for rows of Markdown's tables, which cannot be broken."""
    return sum(
        len(line) > COLUMNS and not (name.endswith(".md") and line.startswith("|"))
        for name in names
        if name not in GENERATED
        for line in text_of(name).splitlines()
    )


def functions(names: list[str]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of the package, with those inside others."""
    for name in names:
        if name.startswith("ckdist/") and name.endswith(".py"):
            for node in ast.walk(ast.parse(text_of(name))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield node


def without_docstring(names: list[str]) -> int:
    """Public functions and methods (no leading underscore) without a docstring."""
    return sum(
        not f.name.startswith("_") and ast.get_docstring(f) is None and not is_overload(f) for f in functions(names)
    )


def is_overload(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A signature alone, for the type checker: the docstring stands at the function itself."""
    return any(ast.unparse(decorator).split(".")[-1] == "overload" for decorator in function.decorator_list)


def long_functions(names: list[str]) -> int:
    """Functions of more than FUNCTION_LINES lines, docstring included."""
    return sum((f.end_lineno or f.lineno) - f.lineno + 1 > FUNCTION_LINES for f in functions(names))


def untyped_arguments(names: list[str]) -> int:
    """Arguments without a type, `self` and `cls` aside."""
    count = 0
    for f in functions(names):
        given = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs, f.args.vararg, f.args.kwarg]
        count += sum(a is not None and a.annotation is None and a.arg not in ("self", "cls") for a in given)
    return count


def private_words(names: list[str]) -> dict[str, int]:
    """How often each private word stands in code, comments and pages."""
    found: Counter[str] = Counter()
    for name in names:
        if name in ("tests/habits.py", "CHANGELOG.md") or not name.startswith(("ckdist/", "docs/", "README", "tests/")):
            continue
        for words in PRIVATE_WORDS:
            found[words] += len(re.findall(words, text_of(name)))
    return {words: found[words] for words in PRIVATE_WORDS}


def rooms(names: list[str]) -> dict[str, int]:
    """Test files by the folder of tests/ in which they lie."""
    tests = [pathlib.Path(n) for n in names if re.match(r"tests/(.*/)?test_\w+\.py$", n)]
    return dict(sorted(Counter(str(path.parent) for path in tests).items()))


def output_of(*words: str) -> str | None:
    """What a tool says on both streams; None where it is not installed."""
    beside = pathlib.Path(sys.executable).parent / words[0]
    program = str(beside) if beside.exists() else shutil.which(words[0])
    if program is None:
        return None
    done = subprocess.run([program, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=600)
    return done.stdout + done.stderr


def ruff_check() -> int | None:
    said = output_of("ruff", "check", "--quiet", "--output-format", "concise", "--exit-zero", ".")
    return None if said is None else len(said.splitlines())


def ruff_format() -> int | None:
    said = output_of("ruff", "format", "--check", "--quiet", "--output-format", "concise", ".")
    return None if said is None else sum("unformatted" in line or "reformat" in line for line in said.splitlines())


def pyright() -> int | None:
    said = output_of("pyright", "--outputjson", "--pythonpath", sys.executable)
    return None if said is None else json.loads(said)["summary"]["errorCount"]


def clang_format(names: list[str]) -> int | None:
    """Files of the native code that clang-format would change."""
    native = [n for n in names if n.endswith(NATIVE)]
    said = output_of("clang-format", "--dry-run", "--ferror-limit=1", *native)
    return None if said is None else len(set(re.findall(r"^(\S+?):\d+:\d+: .*clang-format", said, re.MULTILINE)))


TOOLS: dict[str, tuple[str, bool, Callable[[list[str]], int | None]]] = {
    "ruff check: findings": ("ruff check .", True, lambda _: ruff_check()),
    "ruff format: files to change": ("ruff format --diff .", True, lambda _: ruff_format()),
    "clang-format: files to change": ("clang-format --dry-run FILE", False, clang_format),
    "pyright: errors": ("pyright", False, lambda _: pyright()),
}


def count(quick: bool) -> tuple[dict[str, int], list[str]]:
    """Every count by its name, and the names of tools that are not installed (or were left out)."""
    names = tracked()
    words = private_words(names)
    now = {
        f"lines over {COLUMNS} columns": long_lines(names),
        f"functions over {FUNCTION_LINES} lines": long_functions(names),
        "functions without a docstring": without_docstring(names),
        "arguments without a type": untyped_arguments(names),
        "private words": sum(words.values()),
    }
    wanted = {name: tool for name, (_, fast, tool) in TOOLS.items() if fast or not quick}
    with ThreadPoolExecutor(len(wanted)) as pool:  # each waits for a process
        counts = dict(zip(wanted, pool.map(lambda tool: tool(names), wanted.values()), strict=True))
    missing = []
    for name in TOOLS:
        found = counts.get(name)
        if found is None:
            missing.append(name)
        else:
            now[name] = found
    return now, missing


def main() -> int:
    """Prints the table; 1 where a count has risen and --check was given."""
    parser = argparse.ArgumentParser(description="Counts habits and holds them against the record.")
    parser.add_argument("--check", action="store_true", help="fail where a count is above the last on record")
    parser.add_argument("--update", action="store_true", help="write today's counts as the last on record")
    parser.add_argument("--quick", action="store_true", help="leave out pyright and clang-format")
    parser.add_argument("--words", action="store_true", help="also count each private word and each room of tests")
    wanted = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"first": {}, "last": {}}
    now, missing = count(wanted.quick)
    risen = []
    print(f"{'':32}{'first':>8}{'last':>8}{'now':>8}")
    for name, value in now.items():
        first, last = record["first"].get(name, value), record["last"].get(name, value)
        print(f"{name:32}{first:8}{last:8}{value:8}")
        if value > last:
            risen.append(
                f"{name}: {value}, and {last} on record" + (f"; see: {TOOLS[name][0]}" if name in TOOLS else "")
            )
    for name in missing:
        print(f"{name:32}{'not counted':>24}")
    if wanted.words:
        for word, times in private_words(tracked()).items():
            print(f"  {times:6} {word}  ({PRIVATE_WORDS[word]})")
        for room, files in rooms(tracked()).items():
            print(f"  {files:6} test files in {room}")
    if wanted.update:
        first = {**now, **record["first"]}
        RECORD.write_text(json.dumps({"first": first, "last": {**record["last"], **now}}, indent=2) + "\n")
    elif wanted.check and risen:
        print(*risen, sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
