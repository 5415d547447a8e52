"""The training text of the bundled model: Python's standard library as it is installed, and chats from its docstrings.

Deterministic for one Python version: files are sorted by name, then shuffled by the seed. There is no other text.
"""

import ast
import importlib
import inspect
import json
import sysconfig
import tokenize
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckdist.train.tokenizer_training import END, END_OF_TEXT, tokenizer_config, train_tokenizer

# Tests, tables and third-party text. `_sysconfigdata` holds paths of the machine that built it.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "_bundled", "msilib"}
SKIPPED_STEMS = {
    "topics",
    "_sysconfigdata",
    "mac_",
    "cp",
    "iso8859",
    "koi8",
    "tis_620",
    "ptcp154",
    "palmos",
    "hp_roman8",
    "big5",
    "euc_",
    "gb",
    "shift_",
    "johab",
    "kz1048",
}

# Modules in C: only the running interpreter has their docstrings.
C_MODULES = (
    "builtins",
    "math",
    "cmath",
    "itertools",
    "time",
    "sys",
    "array",
    "zlib",
    "binascii",
    "unicodedata",
    "gc",
    "errno",
    "marshal",
    "select",
    "posix",
    "atexit",
)
ALIASES = {"posixpath": "os.path", "posix": "os", "_collections_abc": "collections.abc"}
TOPICS = "pydoc_data/topics.py"

QUESTIONS = (
    "What does {} do?",
    "What is {}?",
    "Explain {}.",
    "What is {} for?",
    "Tell me about {}.",
    "How do I use {}?",
)
CHAT_VERSIONS = 2  # the same names with other questions and in other groups
GREETINGS = (
    ("Hello", "Hello. I am a small language model trained on Python's standard library. Ask me what a function does."),
    ("Hi!", "Hello. Ask me what a function of Python's standard library does."),
    (
        "Who are you?",
        "I am a small language model trained on the text of Python's standard library. Ask me what a function does.",
    ),
    (
        "What can you do?",
        (
            "I can say what functions of Python's standard library do, and complete Python code. "
            "I am small and often wrong."
        ),
    ),
    ("Thank you", "You are welcome."),
)


@dataclass(frozen=True)
class Entry:
    """One documented name. `signature` is empty for modules, classes and functions in C."""

    name: str
    signature: str
    summary: str


@dataclass
class Corpus:
    train: list[str]
    held_out: list[str]
    entries: list[Entry]
    seed: int

    @property
    def characters(self) -> int:
        return sum(map(len, self.train))

    @classmethod
    def from_stdlib(cls, seed: int) -> "Corpus":
        root = Path(sysconfig.get_paths()["stdlib"])
        texts, entries = [], []
        for path in sorted(root.rglob("*.py")):
            if not wanted(path.relative_to(root)):
                continue
            with tokenize.open(path) as file:
                text = file.read()
            if len(text) > 200:
                texts.append(text)
                entries += source_entries(module_name(path.relative_to(root)), text)
        texts += topic_texts(root / TOPICS)
        for name in C_MODULES:
            entries += c_entries(name)
        np.random.default_rng(seed).shuffle(texts)
        held_out = max(1, len(texts) // 60)
        return cls(texts[held_out:], texts[:held_out], list({e.name: e for e in entries}.values()), seed)

    def chats(self, version: int) -> list[list[dict[str, str]]]:
        """Returns chats of one to three turns. Every documented name occurs once."""
        rng = np.random.default_rng((self.seed, version))
        order = [self.entries[i] for i in rng.permutation(len(self.entries))]
        chats = []
        while order:
            turns = []
            if rng.random() < 0.04:
                turns.append(GREETINGS[rng.integers(len(GREETINGS))])
            for _ in range(min(int(rng.integers(1, 4)), len(order))):
                entry = order.pop()
                question = QUESTIONS[min(int(rng.exponential(1.6)), len(QUESTIONS) - 1)].format(entry.name)
                call = f"{entry.name}{entry.signature}: " if entry.signature and question.startswith("How") else ""
                turns.append((question, call + entry.summary))
            chats.append(
                [
                    {"role": role, "content": text}
                    for turn in turns
                    for role, text in zip(("user", "assistant"), turn, strict=True)
                ]
            )
        return chats

    def write(self, folder: Path, vocab_size: int, context: int) -> None:
        """Writes the files that train_bundled.toml names: texts, chats, held-out texts and a tokenizer."""
        write_lines(folder / "texts.jsonl", ({"text": text} for text in self.train))
        write_lines(folder / "held_out.jsonl", ({"text": text} for text in self.held_out))
        write_lines(
            folder / "chats.jsonl",
            ({"messages": chat} for version in range(CHAT_VERSIONS) for chat in self.chats(version)),
        )
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir(exist_ok=True)
        made = train_tokenizer(self.train + [entry.summary for entry in self.entries], vocab_size)
        made.save(str(tokenizer / "tokenizer.json"))
        ends = {"bos_token_id": 0, "eos_token_id": [made.token_to_id(token) for token in (END_OF_TEXT, END)]}
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(context), indent=2) + "\n")
        (tokenizer / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def write_lines(path: Path, records) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def wanted(path: Path) -> bool:
    if path.as_posix() == TOPICS or any(part in SKIPPED_FOLDERS or part.startswith("config-") for part in path.parts):
        return False
    tables = path.parent.name == "encodings" or path.stem.startswith("_sysconfigdata")
    return not (tables and path.stem.startswith(tuple(SKIPPED_STEMS)))


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    # Names of asyncio's submodules count as names of the package, which users import.
    return "asyncio" if name.startswith("asyncio.") else ALIASES.get(name, name)


def summary_of(docstring: str | None) -> str:
    """Returns the first paragraph on one line; "" if it is missing or too short for an answer."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    # A docstring in C begins with the call. The sentence follows.
    start = 1 if len(paragraphs) > 1 and ("->" in paragraphs[0] or paragraphs[0].endswith(")")) else 0
    text = " ".join(paragraphs[start].split())
    return text if 20 <= len(text) <= 500 else ""


def source_entries(module: str, text: str) -> list[Entry]:
    entries = []

    def visit(node, name):
        summary = summary_of(ast.get_docstring(node))
        if summary:
            function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            entries.append(Entry(name, f"({ast.unparse(node.args)})" if function else "", summary))
        for child in node.body:
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not child.name.startswith(
                "_"
            ):
                visit(child, f"{name}.{child.name}")

    if not module.startswith("_") and "._" not in module:
        visit(ast.parse(text), module)
    return entries


def c_entries(module: str) -> list[Entry]:
    try:
        owner = importlib.import_module(module)
    except ImportError:  # this Python was built without the module
        return []
    prefix = "" if module == "builtins" else f"{ALIASES.get(module, module)}."
    entries = []
    for name, value in sorted(vars(owner).items()):
        if name.startswith("_") or not callable(value):
            continue
        entries.append(Entry(prefix + name, "", summary_of(value.__doc__)))
        if isinstance(value, type) and not issubclass(value, BaseException):
            methods = sorted((m, v) for m, v in vars(value).items() if not m.startswith("_") and callable(v))
            entries += [Entry(f"{prefix}{name}.{m}", "", summary_of(v.__doc__)) for m, v in methods]
    return [entry for entry in entries if entry.summary]


def topic_texts(path: Path) -> list[str]:
    """Returns the pages of the language reference that `help()` shows."""
    if not path.exists():
        return []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "topics":
            return [text for _, text in sorted(ast.literal_eval(node.value).items())]
    return []
