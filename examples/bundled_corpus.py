"""The text that the bundled model learns from: Python's standard library as it is installed, and chats made of its docstrings.

Deterministic for one Python version: files in order of their names, shuffled by the seed. No text from anywhere else.
"""

import ast
import importlib
import inspect
import sysconfig
import tokenize
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT, USER, ASSISTANT, END = SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")

# Words with the space before them, numbers by up to three digits, indentation and newlines in runs.
SPLIT = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""

# Tests, tables and what is not the library's own text; `_sysconfigdata` holds paths of the machine it was built on.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "_bundled", "msilib"}
SKIPPED_STEMS = {"topics", "_sysconfigdata", "mac_", "cp", "iso8859", "koi8", "tis_620", "ptcp154", "palmos", "hp_roman8", "big5", "euc_", "gb", "shift_", "johab", "kz1048"}

# Modules in C, whose docstrings only the running interpreter has.
C_MODULES = ("builtins", "math", "cmath", "itertools", "time", "sys", "array", "zlib", "binascii", "unicodedata", "gc", "errno", "marshal", "select", "posix", "atexit")
ALIASES = {"posixpath": "os.path", "posix": "os", "_collections_abc": "collections.abc"}
TOPICS = "pydoc_data/topics.py"

QUESTIONS = ("What does {} do?", "What is {}?", "Explain {}.", "What is {} for?", "Tell me about {}.", "How do I use {}?")
GREETINGS = (
    ("Hello", "Hello. I am a small language model trained on Python's standard library. Ask me what a function does."),
    ("Hi!", "Hello. Ask me what a function of Python's standard library does."),
    ("Who are you?", "I am a small language model trained on the text of Python's standard library. Ask me what a function does."),
    ("What can you do?", "I can say what functions of Python's standard library do, and complete Python code. I am small and often wrong."),
    ("Thank you", "You are welcome."),
)


@dataclass(frozen=True)
class Entry:
    """One documented name: `signature` is empty for modules, classes and functions written in C."""

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

    def chat(self, rng: np.random.Generator, order: list[Entry]) -> str:
        """One chat of one to three turns about the entries popped from `order`."""
        turns = []
        if rng.random() < 0.04:
            turns.append(GREETINGS[rng.integers(len(GREETINGS))])
        for _ in range(min(int(rng.integers(1, 4)), len(order))):
            entry = order.pop()
            question = QUESTIONS[min(int(rng.exponential(1.6)), len(QUESTIONS) - 1)].format(entry.name)
            call = f"{entry.name}{entry.signature}: " if entry.signature and question.startswith("How") else ""
            turns.append((question, call + entry.summary))
        return "".join(f"{USER}\n{question}{END}\n{ASSISTANT}\n{answer}{END}\n" for question, answer in turns)

    def encode(self, tokenizer: Tokenizer) -> "Data":
        encode = lambda texts: [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
        return Data(self, tokenizer, encode(self.train), encode(self.held_out))


class Data:
    """An endless stream of token windows; every epoch shuffles the documents and makes new chats."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, train: list[np.ndarray], held_out: list[np.ndarray]):
        self.corpus, self.tokenizer, self.train, self.held_out = corpus, tokenizer, train, held_out
        self.separator = np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype=np.uint16)
        self.epoch, self.position = 0, 0
        self.stream = self.make_epoch()
        self.tokens_per_epoch = len(self.stream)

    def make_epoch(self) -> np.ndarray:
        rng = np.random.default_rng((self.corpus.seed, self.epoch))
        order = [self.corpus.entries[i] for i in rng.permutation(len(self.corpus.entries))]
        chats = []
        while order:
            chats.append(self.corpus.chat(rng, order))
        chats = [np.array(e.ids, dtype=np.uint16) for e in self.tokenizer.encode_batch(chats, add_special_tokens=False)]
        # Chats lie in bunches between the files, so that no stretch of training sees only one kind.
        bunches = np.array_split(np.arange(len(chats)), len(self.train))
        parts = []
        for bunch, index in zip(bunches, rng.permutation(len(self.train))):
            parts += [self.separator, self.train[index]]
            for chat in bunch:
                parts += [self.separator, chats[chat]]
        return np.concatenate(parts)

    def seek(self, tokens: int) -> None:
        """Goes on after `tokens` tokens of earlier training."""
        while tokens >= len(self.stream):
            tokens -= len(self.stream)
            self.epoch += 1
            self.stream = self.make_epoch()
        self.position = tokens

    def windows(self, count: int, tokens: int) -> np.ndarray:  # (count, tokens + 1)
        need = count * tokens
        if self.position + need + 1 > len(self.stream):
            self.epoch, self.position = self.epoch + 1, 0
            self.stream = self.make_epoch()
        piece = self.stream[self.position : self.position + need + 1]
        self.position += need
        return np.stack([piece[i * tokens : (i + 1) * tokens + 1] for i in range(count)])

    def validation(self, tokens: int, limit: int = 24) -> np.ndarray:  # (at most limit, tokens + 1)
        text = np.concatenate([part for document in self.held_out for part in (self.separator, document)])
        return np.stack([text[i * tokens : (i + 1) * tokens + 1] for i in range(min(limit, (len(text) - 1) // tokens))])


def wanted(path: Path) -> bool:
    if path.as_posix() == TOPICS or any(part in SKIPPED_FOLDERS or part.startswith("config-") for part in path.parts):
        return False
    tables = path.parent.name == "encodings" or path.stem.startswith("_sysconfigdata")
    return not (tables and path.stem.startswith(tuple(SKIPPED_STEMS)))


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    # asyncio's submodules are read, its package is imported.
    return "asyncio" if name.startswith("asyncio.") else ALIASES.get(name, name)


def summary_of(docstring: str | None) -> str:
    """The first paragraph in one line; empty where it is missing or too short to be an answer."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    # A docstring in C begins with the call; the sentence comes after it.
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
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
                visit(child, f"{name}.{child.name}")

    if not module.startswith("_") and "._" not in module:
        visit(ast.parse(text), module)
    return entries


def c_entries(module: str) -> list[Entry]:
    try:
        owner = importlib.import_module(module)
    except ImportError:  # built without it
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
    """The pages of the language reference that `help()` shows."""
    if not path.exists():
        return []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "topics":
            return [text for _, text in sorted(ast.literal_eval(node.value).items())]
    return []


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Byte-level BPE over the training text; the special tokens come first, so <|endoftext|> is 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    answers = [entry.summary for entry in corpus.entries]
    tokenizer.train_from_iterator(corpus.train + answers, trainer)
    bos = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, bos)]),
        ]
    )
    return tokenizer
