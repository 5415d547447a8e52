"""The pages: every command runs, every link of code leads somewhere, every reference is written.

Blocks of ```bash and ```python run in their order, one shell per block, in one folder per page. A comment before a
block changes that: `<!-- not run: why -->` leaves it out, `<!-- server -->` runs it beside the blocks that follow and
waits until it answers. Port 8080 stands for a free one.
"""

import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

import pytest

from tests.support.launcher import one_host
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.stubs import stubs

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>server|not run: (?P<why>[^\n]+)) -->\n)?^```(?P<language>bash|python)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SECONDS = 120
MOST_LINES = 200
# What the examples train on, and sizes on which no command depends.
SMALLER = [
    (r"^train_file = \[.*?^\]", 'train_file = ["{stdlib}/json/*.py"]'),
    (r"^max_length = \d+", "max_length = 64"),
    (r"^vocab_size = \d+", "vocab_size = 512"),
    (r"^num_hidden_layers = 4$", "num_hidden_layers = 2"),
]


@dataclass(frozen=True)
class Block:
    """One block of a page. `mark`: what the comment before it says, or None."""

    language: str
    code: str
    mark: str | None


def blocks(page: pathlib.Path) -> list[Block]:
    """The page's blocks of commands."""
    return [Block(m["language"], m["code"], m["mark"]) for m in BLOCK.finditer(page.read_text())]


RUNNABLE = [page for page in PAGES if any(b.mark is None or b.mark == "server" for b in blocks(page))]


def answers(port: int, server: subprocess.Popen) -> bool:
    assert server.poll() is None, f"the server ended with {server.returncode}"
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as error:
        return error.code == 401  # it has keys
    except OSError:
        return False


SCRIPT = """\
#!/bin/sh
export PATH='{path}'
exec {stub} {program} "$@"
"""


@pytest.fixture(scope="module")
def stub():
    with stubs() as words:
        yield words


@pytest.fixture
def place(tmp_path, stub):
    """A folder with the repository's examples, whose trainings are made smaller, and a `ckdist` that is this one."""
    for name in ("launch", "benchmarks", "hostfiles"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for file in (tmp_path / "examples").glob("*.toml"):
        text = file.read_text()
        for large, small in SMALLER:
            text = re.sub(large, small, text, flags=re.MULTILINE | re.DOTALL)
        file.write_text(text)
    commands = tmp_path / "commands"
    commands.mkdir()
    given = one_host()
    for name, words in (("ckdist", "-m ckdist.cli.main"), ("python", "")):
        script, program = commands / name, f"{sys.executable} {words}"
        script.write_text(SCRIPT.format(path=given["PATH"], program=program, stub=" ".join(stub)))
        script.chmod(0o755)
    return tmp_path, {**given, "PATH": f"{commands}:{given['PATH']}", "XDG_STATE_HOME": str(tmp_path)}


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda p: str(p.relative_to(ROOT)))
@pytest.mark.timeout(600)
def test_commands_run(page, place):
    folder, environment = place
    port, other = free_port(), free_port()
    servers = []
    try:
        for block in blocks(page):
            if block.mark and block.mark != "server":
                continue
            code = block.code.replace("8080", str(port)).replace("29500", str(other))
            words = (
                ["bash", "-euo", "pipefail", "-c", code] if block.language == "bash" else [sys.executable, "-c", code]
            )
            with open(folder / "output", "w+b") as output:
                process = subprocess.Popen(
                    words, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
                servers.append(process)
                if block.mark == "server":
                    until = time.monotonic() + SECONDS
                    while not answers(port, process):
                        assert time.monotonic() < until, (folder / "output").read_text()
                        time.sleep(0.1)
                    continue
                code_of = process.wait(SECONDS)
                said = (folder / "output").read_text(errors="replace")
                assert code_of == 0, f"{block.code}\nends with {code_of}:\n{said[-3000:]}"
    finally:
        for process in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_what_is_not_run_says_why():
    for page in PAGES:
        for m in BLOCK.finditer(page.read_text()):
            assert m["why"] is None or len(m["why"]) > 10, page
        text = page.read_text()
        shells = re.findall(r"^```(\w*)$", text, re.MULTILINE)[::2]
        assert not {"sh", "shell", "console"} & set(shells), f"{page}: blocks of commands are ```bash"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_is_short_and_its_files_exist(page):
    text = page.read_text()
    assert text.startswith("# ") and text.count("\n") <= MOST_LINES
    lines = [line for line in text.splitlines() if not line.startswith("|")]  # a row of a table cannot be broken
    assert all(len(line) <= 120 for line in lines), "a line is over 120 columns"
    for name in re.findall(r"`((?:ckdist|tests|benchmarks|examples|docs|launch|hostfiles)/[\w./*-]+)`", text):
        stem = name.rstrip("/")
        assert list(ROOT.glob(stem)) or list(ROOT.glob(f"{stem}.*")), f"{name} does not exist"


@pytest.mark.parametrize("page", sorted((DOCS / "extend").glob("*.md")), ids=lambda p: p.stem)
def test_a_diff_is_of_the_present_code(page):
    """What a diff adds stands in the file that the diff names, however a formatter breaks its lines."""
    diffs = re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert diffs
    for diff in diffs:
        have = ""
        for line in re.split(r"^(?=@@|\+\+\+ )", diff, flags=re.MULTILINE):
            name, _, rest = line.partition("\n")
            if name.startswith("+++ "):
                have = bare((ROOT / name.removeprefix("+++ b/")).read_text())
                continue
            added = "\n".join(text[1:] for text in rest.splitlines() if text[:1] in "+ ")
            assert bare(added) in have, f"{added}\nis not in the code any more: mend the page"


def bare(code: str) -> str:
    """`code` without what a formatter decides: white space, and commas before a closing bracket."""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", code))


def reference():
    """The generator, without mkdocs where that is not installed."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: make docs")
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_whole():
    module = reference()
    pages = module.pages()
    for flag in ("--kv-memory", "--api-key-file", "--n-parallel", "--url", "--accept-license"):
        assert f"`{flag}`" in pages["reference/commands.md"]
    fields = "messages prompt stream stop temperature top_p top_k seed max_tokens n_predict logprobs logit_bias grammar"
    for name in fields.split():
        assert f"`{name}`" in pages["reference/requests.md"], name
    for name in ("/v1/chat/completions", "/completion", "/tokenize", "/metrics", "/v1/embeddings"):
        assert f"`{name}`" in pages["reference/endpoints.md"]
    for name in ("vllm:num_requests_running", "llamacpp:requests_processing", "ckdist_step_seconds"):
        assert name in pages["reference/metrics.md"]
    assert "Rank 0's" not in pages["reference/metrics.md"], "a number of rank 0 without a meaning: serve/metrics.py"
    assert "`CapacityError`" in pages["reference/errors.md"]
    from ckdist.train.config import TrainConfig

    assert all(f"`{name}`" in pages["reference/training.md"] for name in TrainConfig.__dataclass_fields__)


def test_every_variable_is_told():
    """CKDIST_* that Python or C++ read, against the reference."""
    read = set()
    for path in [*(ROOT / "ckdist").rglob("*.py"), *(ROOT / "ckdist/native").rglob("*.cpp")]:
        text = path.read_text()
        read |= set(re.findall(r'getenv\("(\w+)"\)', text))
        if path.suffix == ".py":
            read |= set(re.findall(r'(?:environ\.get\(|environ\[|VARIABLE = )"((?:CKDIST|XDG)_\w+)"', text))
    assert {name for name in read if name.startswith(("CKDIST", "XDG"))} <= set(reference().VARIABLES)
