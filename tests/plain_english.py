"""Counts sentences that must be read twice: in docstrings, C++ comments, pages, help texts and messages.

    python tests/plain_english.py                 the counts of each kind of text
    python tests/plain_english.py ckdist/engine   each finding below a folder, with its line

A pattern finds a turn of phrase, not a fault. Sometimes a plain sentence matches: reword it. `tests/habits.py` compares
the counts with the record.
"""

import ast
import functools
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
IF = (
    r"there (?:is|are|was|were)|it (?:is|has|was|can|does|would|had|costs|pays|were)|they (?:are|have|can|do|were)"
    r"|nobody|nothing|none\b|no\b|not\b|that (?:is|has|pays|does|fails|can)|one is|some\b|several\b|both\b|a user"
    r"|asked|wanted|given"
)
PATTERNS = {
    "a name in place of 'what …'": r"(?<!\")\b[Ww]hat\b(?![^.;:]*\?)",
    "a subject first": r"(?:^|(?<=[.:;] )|(?<=\n))"
    r"(?:Of|That (?:the|a|an|of|it|which|this|no|all|each|`\w+`)|Than|Whom)\b",
    "'if' for a condition": rf"\bwhere (?:{IF})",
    "no inverted clause": r"\b(?:[Oo]f|[Tt]han|[Tt]o|[Bb]y) (?:which|whom|whose)\b",
    "programs do not tell or hear": r"\b(?:is|are|was|were|be|been) told\b|\btells?\b|\bhears?\b|\blets? go\b"
    r"|\bletting go\b",
    "the field's words": r"\banew\b|\bbeside\b|\b(?:so|as) many\b(?! as)|\bso much\b|\balike\b|\bbehind \d",
}


@functools.cache
def nodes_of(path: pathlib.Path) -> list[ast.AST]:
    """All nodes of a file of Python, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


class Text(NamedTuple):
    """A piece of prose: its kind, file and first line."""

    kind: str
    file: str
    line: int
    text: str


def docstrings(file: str, nodes: list[ast.AST]) -> Iterator[Text]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Text("docstrings", file, node.body[0].lineno, text)


def literal(node: ast.AST) -> str:
    """The text of a string, of joined strings and of the fixed parts of an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) if isinstance(part, ast.Constant) else "x" for part in node.values)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    return ""


def messages(file: str, nodes: list[ast.AST]) -> Iterator[Text]:
    """Help texts, and the texts of errors and log lines."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            if keyword.arg == "help" and (text := literal(keyword.value)):
                yield Text("help", file, keyword.value.lineno, text)
        name = getattr(node.func, "attr", "") or ast.unparse(node.func).rpartition(".")[2]
        if name.endswith(("Error", "Problem")) or name in ("warning", "error", "info", "print", "note", "fail"):
            for argument in node.args:
                if len((text := literal(argument)).split()) > 2:
                    yield Text("messages", file, argument.lineno, text)


def comments(file: str, text: str) -> Iterator[Text]:
    """Blocks of `//` comments of C++."""
    for match in re.finditer(r"(?:^[ \t]*//.*\n)+|[^:]//.*$", text, re.MULTILINE):
        prose = re.sub(r"^\s*\S?//\s?", "", match[0], flags=re.MULTILINE).strip()
        if not prose.startswith(("clang-format", "namespace", "NOLINT")):
            yield Text("C++ comments", file, text.count("\n", 0, match.start()) + 1, prose)


def paragraphs(file: str, text: str) -> Iterator[Text]:
    """Paragraphs, list items and table rows of Markdown, without code."""
    text = re.sub(r"^```.*?^```", lambda match: re.sub(r"[^\n]", "", match[0]), text, flags=re.MULTILINE | re.DOTALL)
    for match in re.finditer(r"^.*\S.*\n?(?:(?! *(?:[-*] |\d+\. |[|#])).*\S.*\n?)*", text, re.MULTILINE):
        yield Text("pages", file, text.count("\n", 0, match.start()) + 1, match[0])


def texts() -> Iterator[Text]:
    """Every text that a reader of the project meets."""
    for path in sorted((ROOT / "ckdist").rglob("*.py")):
        if path.name == "declarations.py":
            continue
        file = str(path.relative_to(ROOT))
        nodes = nodes_of(path)
        yield from docstrings(file, nodes)
        yield from messages(file, nodes)
    for path in sorted([*(ROOT / "ckdist/native").rglob("*.cpp"), *(ROOT / "ckdist/native").rglob("*.h")]):
        yield from comments(str(path.relative_to(ROOT)), path.read_text())
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "launch").rglob("*.md")]):
        text = path.read_text()
        if path.name == "CHANGELOG.md":  # released sections stay as they are
            text = "## [".join(text.split("## [")[:2])
        yield from paragraphs(str(path.relative_to(ROOT)), text)


def findings(text: str) -> list[tuple[str, str]]:
    """(what is wanted, the words that matched) of each match."""
    return [(wanted, match[0]) for wanted, pattern in PATTERNS.items() for match in re.finditer(pattern, text)]


def counts() -> dict[str, tuple[int, int]]:
    """By kind of text: how many have a finding, of how many."""
    marked, all_texts = Counter[str](), Counter[str]()
    for text in texts():
        all_texts[text.kind] += 1
        marked[text.kind] += bool(findings(text.text))
    return {kind: (marked[kind], count) for kind, count in all_texts.items()}


def main() -> None:
    """Prints the counts, or the findings below the folders that are given."""
    for text in texts() if sys.argv[1:] else ():
        if text.file.startswith(tuple(sys.argv[1:])):
            for wanted, match in findings(text.text):
                print(f"{text.file}:{text.line}: {match.strip()!r}: {wanted}")
    for kind, (marked, count) in counts().items():
        print(f"{kind:14}{marked:6} of {count:5} {100 * marked / count:5.1f} %")


if __name__ == "__main__":
    main()
