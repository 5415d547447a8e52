"""Counts faults of style and compares them with the record: `make lint`.

    python tests/habits.py            a table of what is counted: first on record, last on record, now
    python tests/habits.py --check    also fails if a count is above the last on record
    python tests/habits.py --update   writes the counts of today as the last on record
    ... --quick                       leaves out the tools that take longer than a second

The record is tests/habits.json. A count may fall and never rise, so a merge cannot bring a new finding. The goal is 0,
and for docstrings of "English" less than 3 %: `python tests/plain_english.py` prints the shares.
"""

import argparse
import ast
import functools
import gc
import json
import pathlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import plain_english

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
FAMILY_READERS = ("config", "gguf", "written")  # of every family; docs/extend/family.md explains them
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

# Words with a meaning in this project only, each with the field's word. If a word is also plain English, its pattern
# matches the private sense only: ranks *cut* tensors and pass messages over *wires*, but an answer may be cut short,
# and bytes go over the wire. `--reorganize` is the former name of a public flag, and wire$i a device that the virtual
# machine's script makes.
SHARDED = r"tokens?|tensors?|heads?|ffn|matri(?:x|ces)|layers?|dim(?:ension)?s?|batch|columns|work|weights"
PRIVATE_WORDS = {
    r"[Mm]eeting": "shared-memory rendezvous",
    r"[Pp]arcels?": "eager message",
    r"[Pp]ulse": "heartbeat, failure detector",
    r"StartLine|start_line\b|START_LINE": "bootstrap connection",
    r"\bReach\b|\breach_|\bfelt\b": "cache distance, probe",
    r"\btwins?\b": "peer of the same local rank",
    r"\bWires?\b|(?<!the )\bwires?\b(?! format|\$)|\bPipes\b": "transport",
    r"[Mm]overs?\b": "copy",
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
    """Paths of the repository's text files, relative to its root, without data that others made."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return [n for n in names if pathlib.Path(n).suffix in TEXT and not n.startswith(DATA) and (ROOT / n).is_file()]


@functools.cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(errors="replace")


def long_lines(names: list[str]) -> int:
    """Lines over the limit. Rows of Markdown tables cannot be broken, so they do not count."""
    return sum(
        len(line) > COLUMNS and not (name.endswith(".md") and line.startswith("|"))
        for name in names
        if name not in GENERATED
        for line in text_of(name).splitlines()
    )


def functions(names: list[str]) -> Iterator[Function]:
    """All functions of the package, with those inside others."""
    for name in names:
        if name.startswith("ckdist/") and name.endswith(".py"):
            for node in plain_english.nodes_of(ROOT / name):
                if isinstance(node, Function):
                    yield node


def without_docstring(names: list[str]) -> int:
    """Public functions and methods without a docstring.

    These need none: names with a leading underscore, functions inside functions, overloads, overrides, properties that
    return a field, and functions that every family or op has.
    """
    nodes = [
        node
        for name in names
        if name.startswith("ckdist/") and name.endswith(".py")
        for node in plain_english.nodes_of(ROOT / name)[0].body
    ]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    by_name = {cls.name: cls for cls in classes}
    found = [node for node in nodes if isinstance(node, Function)]
    for cls in classes:
        if not cls.name.startswith("_"):
            inherited = inherited_names(cls, by_name)
            found += [f for f in cls.body if isinstance(f, Function) and f.name not in inherited]
    return sum(not f.name.startswith("_") and ast.get_docstring(f) is None and not explains_itself(f) for f in found)


def inherited_names(cls: ast.ClassDef, by_name: dict[str, ast.ClassDef]) -> set[str]:
    """The names of methods that the package's base classes of `cls` define."""
    found: set[str] = set()
    for base in (by_name[name] for name in map(ast.unparse, cls.bases) if name in by_name):
        found |= {f.name for f in base.body if isinstance(f, Function)} | inherited_names(base, by_name)
    return found


def explains_itself(function: Function) -> bool:
    """Whether the function is an overload, a property that returns a field, or one of many with the same task."""
    decorators = {ast.unparse(decorator).split(".")[-1].partition("(")[0] for decorator in function.decorator_list}
    if decorators & {"overload", "lower"} or function.name in FAMILY_READERS:
        return True
    returned = function.body[0].value if isinstance(function.body[0], ast.Return) else None
    return "property" in decorators and isinstance(returned, ast.Attribute)


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


def repeated_names(names: list[str]) -> int:
    """Names that several files of the package have, `__init__.py` aside."""
    counts = Counter(pathlib.Path(n).name for n in names if n.startswith("ckdist/"))
    return sum(times > 1 for name, times in counts.items() if name != "__init__.py")


def private_words(names: list[str]) -> dict[str, int]:
    """The number of each private word in code, comments and pages."""
    found: Counter[str] = Counter()
    for name in names:
        if name in ("tests/habits.py", "CHANGELOG.md") or not name.startswith(("ckdist/", "docs/", "README", "tests/")):
            continue
        for words in PRIVATE_WORDS:
            found[words] += len(re.findall(words, text_of(name)))
    return {words: found[words] for words in PRIVATE_WORDS}


def rooms(names: list[str]) -> dict[str, int]:
    """The number of test files in each folder of tests/."""
    tests = [pathlib.Path(n) for n in names if re.match(r"tests/(.*/)?test_\w+\.py$", n)]
    return dict(sorted(Counter(str(path.parent) for path in tests).items()))


def output_of(*words: str) -> str | None:
    """The output of a tool on both streams; None if it is not installed."""
    local = pathlib.Path(sys.executable).parent / words[0]
    program = str(local) if local.exists() else shutil.which(words[0])
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
ENGLISH = "English: "  # before the kind of text


def count(quick: bool) -> tuple[dict[str, int], list[str]]:
    """Every count by its name, and the names of tools that are not installed or were left out."""
    gc.disable()  # millions of nodes of syntax trees, and no cycles
    names = tracked()
    words = private_words(names)
    now = {
        f"lines over {COLUMNS} columns": long_lines(names),
        f"functions over {FUNCTION_LINES} lines": long_functions(names),
        "functions without a docstring": without_docstring(names),
        "arguments without a type": untyped_arguments(names),
        "file names that occur twice": repeated_names(names),
        "private words": sum(words.values()),
        **{ENGLISH + kind: marked for kind, (marked, _) in plain_english.counts().items()},
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
    """Prints the table. Returns 1 if a count has risen and --check was given."""
    parser = argparse.ArgumentParser(description="Counts faults of style and compares them with the record.")
    parser.add_argument("--check", action="store_true", help="fail if a count is above the last on record")
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
            see = "python tests/plain_english.py ckdist docs" if name.startswith(ENGLISH) else ""
            see = TOOLS[name][0] if name in TOOLS else see
            risen.append(f"{name}: {value}, and {last} on record" + (f"; see: {see}" if see else ""))
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
