"""Traces: rings that keep the newest, files of whole jobs that a viewer can read, clocks put in line, ranks that are
lost.
"""

import json
import shutil
import signal
import threading
import time
from collections import Counter
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from ckdist import native
from ckdist.comm.bootstrap.tcp_world import TcpWorld
from ckdist.comm.world import SingleWorld
from ckdist.engine import trace as traces
from ckdist.engine.trace import EVENT, Trace, clock_offset
from ckdist.errors import ConfigError
from tests.support.launcher import run_ranks
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.served import wait_healthy, write_tokenizer
from tests.support.torchrun import finish, secret, start

lib, ffi = native.lib, native.ffi
LAYERS = 4  # of the bundled model


def read(path) -> tuple[dict, dict, dict]:
    """The events of every lane by (rank, name of the lane), names of ranks, and what is said about the trace."""
    data = json.loads(path.read_text())
    lanes, names, ranks = {}, {}, {}
    for event in data["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["pid"], event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "process_name":
            ranks[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            lanes.setdefault(names[event["pid"], event["tid"]], []).append(event)
    return lanes, ranks, data["otherData"]


def nested(events: list[dict]) -> list[tuple[dict, list[dict]]]:
    """Each event with those around it, outermost first; fails where two overlap in part."""
    found, open_ = [], []
    for event in events:
        begin, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        while open_ and open_[-1][1] <= begin:
            open_.pop()
        assert begin >= 0 and end >= begin and (not open_ or end <= open_[-1][1]), f"{event} ends after {open_[-1][2]}"
        found.append((event, [parent for *_, parent in open_]))
        open_.append((begin, end, event))
    return found


def test_a_lane_keeps_the_newest_while_another_thread_reads():
    out = ffi.new("struct ckdist_trace **")
    native.check(lib.ckdist_trace_new(1000, out))
    handle, lane = ffi.gc(out[0], lib.ckdist_trace_free), ffi.new("struct ckdist_trace_lane **")
    native.check(lib.ckdist_trace_add_lane(handle, b"copy engine", lane))
    total = 60000

    def copies():
        for i in range(total):
            lib.ckdist_trace_add(lane[0], lib.ckdist_trace_copy, i, i + 7, i, -i, i)

    thread = threading.Thread(target=copies)
    thread.start()
    room, dropped, last = np.empty(1000, EVENT), ffi.new("int64_t *"), -1
    while last < total - 1:
        count = lib.ckdist_trace_read(handle, 0, native.pointer(room, "struct ckdist_trace_event *"), dropped)
        events = room[:count]
        np.testing.assert_array_equal(events["begin"], dropped[0] + np.arange(count))
        np.testing.assert_array_equal(events["end"], events["begin"] + 7)
        np.testing.assert_array_equal(events["args"], events["begin"][:, None] * [1, -1, 1])
        last = dropped[0] + count - 1
    thread.join()
    assert (count, dropped[0], set(events["kind"])) == (1000, total - 1000, {lib.ckdist_trace_copy})
    with pytest.raises(ConfigError, match="a lane of 0 events"):
        native.check(lib.ckdist_trace_new(0, out))


def test_every_kind_has_a_name():
    assert sorted(traces.KINDS) == list(range(len(traces.KINDS))) and len(
        {name for name, *_ in traces.KINDS.values()}
    ) == len(traces.KINDS)


def test_the_file_is_bounded_and_says_what_it_lacks(tmp_path):
    trace = Trace(str(tmp_path / "t.json"), SingleWorld(), threads=1 << 20)
    for i in range(5000):
        trace.main.add(lib.ckdist_trace_run, 1000 * i, 1000 * i + 500, i, 1)
    trace.save([])
    trace.save_own([])  # once is enough
    lanes, ranks, about = read(tmp_path / "t.json")
    events = lanes[0, "engine"]
    assert about["dropped"] == {"rank 0 engine": 904} and about["missing"] == [] and list(ranks) == [0]
    assert [e["args"]["tokens"] for e in events] == list(range(904, 5000))
    assert events[1] == {
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "ts": 1.0,
        "dur": 0.5,
        "name": "run",
        "cat": "scheduler",
        "args": {"tokens": 905, "sequences": 1},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_a_disk_that_is_full_fails_nothing(tmp_path, caplog, monkeypatch):
    trace = Trace(str(tmp_path / "t.json"), SingleWorld(), threads=1)
    shutil.rmtree(tmp_path)
    trace.save([])
    assert caplog.messages == [f"the trace could not be written to {tmp_path}/t.json: No such file or directory"]


def test_paths_are_refused_before_anything_is_loaded():
    for path, why in [
        ("/tmp", "it is a folder, not a regular file"),
        ("/dev/null", "it is a device, not a regular file"),
        ("/proc/t.json", "No such file or directory"),
        ("a\0b", "embedded null byte"),
    ]:
        with pytest.raises(ConfigError, match=f"cannot write --trace {path}: {why}"):
            Trace(path, SingleWorld(), 1)
    done = run_ranks(
        2,
        "-m",
        "ckdist.cli.main",
        "perplexity",
        "--token-ids",
        "4,5",
        "-t",
        "1",
        "--trace",
        "/nowhere/t.json",
        timeout=40,
    )
    assert (
        done.returncode == 2
        and "ckdist: cannot write --trace /nowhere/t.json: No such file or directory\n" in done.stderr
        and "loaded" not in done.stderr
    )


def test_ranks_and_threads_of_a_job(tmp_path):
    path, generated = tmp_path / "t.json", 9
    words = (
        "generate",
        "-p",
        "def main(self):\n    return",
        "-n",
        str(generated),
        "--temp",
        "0",
        "--ignore-eos",
        "-t",
        "2",
        "--prefill",
        "token",
        "--trace",
        str(path),
    )
    done = run_ranks(2, "-m", "ckdist.cli.main", *words, timeout=60)
    assert done.returncode == 0, done.stderr
    lanes, ranks, about = read(path)
    assert (
        about["missing"] == []
        and set(about["dropped"].values()) == {0}
        and [name.split(" (")[0] for name in ranks.values()] == ["rank 0", "rank 1"]
    )
    threads = {(rank, f"thread {t}") for rank in range(2) for t in range(2)}
    copies = {key: lanes.pop(key) for key in list(lanes) if key[1].startswith("repacker")}
    assert all(e["name"] == "copy" and 0 < e["args"]["KiB"] <= 1024 for lane in copies.values() for e in lane)
    assert set(lanes) == threads | {(0, "engine"), (1, "start")}
    names = Counter(e["name"] for e in lanes[0, "engine"])
    assert names == {
        "load weights": 1,
        "choose prefill": 1,
        "schedule": generated,
        "run": generated,
        "sample": generated,
    }
    batches = {}
    for rank, thread in threads:
        tree = nested(lanes[rank, thread])
        outer = [event for event, parents in tree if not parents]
        steps = [e for e in outer if e["name"] not in ("transition", "publish")]
        assert [e["name"] for e in steps] == ["prefill by tokens"] + ["decode"] * (generated - 1)
        assert steps[0]["args"]["tokens"] > 4 and {
            (e["args"]["tokens"], e["args"]["sequences"]) for e in steps[1:]
        } == {(1, 1)}
        within = {
            id(step): [event for event, parents in tree if len(parents) == 1 and parents[0] is step] for step in steps
        }
        for step in steps:
            ops = [e for e in within[id(step)] if e["cat"] == "replay"]
            assert [e["args"]["step"] for e in ops] == list(range(len(ops)))
            assert {e["args"].get("layer") for e in ops} == {None, *range(LAYERS)}
            kinds = Counter(e["name"].split()[0] for e in ops)
            assert (
                kinds["attend"] == LAYERS
                and kinds["linear"] == 4 * LAYERS + 1
                and kinds["embed"] == 1
                and kinds["norm_quantize"] >= 3 * LAYERS
            )
            assert [e["args"]["layer"] for e in ops if e["name"] == "linear gate_proj up_proj"] == list(range(LAYERS))
        waits = [(event, parents) for event, parents in tree if event["cat"] == "wait"]
        assert {event["name"] for event, _ in waits} == {"barrier", "exchange"}
        assert all(
            parents[-1]["cat"] == "replay" and parents[-1]["args"]["step"] == event["args"]["step"]
            for event, parents in waits
        )
        assert sum(event["name"] == "exchange" and parents[0] is steps[1] for event, parents in waits) == 2 * LAYERS + 2
        transitions = [e for e in outer if e["name"] == "transition"]
        assert len(transitions) == (thread == "thread 0")
        for e in transitions:
            assert e["ts"] == pytest.approx(steps[0]["ts"] + steps[0]["dur"], abs=0.002) and e["ts"] + e[
                "dur"
            ] == pytest.approx(steps[1]["ts"], abs=0.002)
        assert sum(event["name"] == "publish" for event, _ in tree) == generated * ((rank, thread) == (0, "thread 0"))
        batches[rank, thread] = steps
    # one clock: every rank's and thread's step overlaps rank 0's, inside what the engine sees of it
    for other in batches.values():
        for mine, theirs, run in zip(
            batches[0, "thread 0"], other, [e for e in lanes[0, "engine"] if e["name"] == "run"], strict=True
        ):
            assert theirs["ts"] < mine["ts"] + mine["dur"] and mine["ts"] < theirs["ts"] + theirs["dur"]
            assert run["ts"] < theirs["ts"] < run["ts"] + run["dur"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_server_writes_it_when_it_ends(tmp_path, lost):
    folder, path = (
        write_tokenizer(shutil.copytree(ROOT / "tests/golden/llama3", tmp_path / "model")),
        tmp_path / "t.json",
    )
    port, key, http = free_port(), secret(tmp_path), free_port()
    words = (
        "serve",
        "-m",
        str(folder),
        "--port",
        str(http),
        "-t",
        "1",
        "-c",
        "64",
        "--comm-timeout",
        "2",
        "--prefill",
        "tensor",  # what auto would measure takes long where cores are busy
        "--trace",
        str(path),
    )
    ranks = [start(rank, 2, port, *words, CKDIST_JOB_SECRET_FILE=key) for rank in range(2)]
    try:
        url = f"http://127.0.0.1:{http}"
        wait_healthy(url)
        assert (
            httpx.post(
                url + "/v1/completions",
                json={"prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True},
                timeout=20,
            ).status_code
            == 200
        )
        ranks[1].kill() if lost else ranks[0].send_signal(signal.SIGTERM)
        begin = time.monotonic()
        ranks[0].wait(30)
        assert time.monotonic() - begin < 15
    finally:
        codes = [code for code, *_ in finish(ranks)]
    lanes, _, about = read(path)
    assert codes == ([1, -signal.SIGKILL] if lost else [0, 0])
    assert about["missing"] == (["rank 1"] if lost else [])
    lanes = {key: lane for key, lane in lanes.items() if not key[1].startswith("repacker")}
    assert set(lanes) == {(0, "engine"), (0, "thread 0")} | (set() if lost else {(1, "start"), (1, "thread 0")})
    names = Counter(e["name"] for e in lanes[0, "engine"])
    assert names["run"] == names["send"] == 5 and names["receive"] >= 5


def test_collecting_waits_for_nobody_for_long(tmp_path):
    port, results = free_port(), {}

    def rank(number):
        world = TcpWorld(number, 3, "127.0.0.1", port, b"secret of this test", timeout=20)
        begin = time.monotonic()
        results[number] = world.collect(f"from {number}", 1.0) if number != 1 else None  # rank 1 says nothing
        if number == 0:
            assert time.monotonic() - begin < 5
            done.set()
        done.wait(20)
        world.close()

    done = threading.Event()
    threads = [threading.Thread(target=rank, args=(r,)) for r in range(3)]
    [t.start() for t in threads], [t.join(40) for t in threads]
    assert results[0] == ["from 0", None, "from 2"]
    code = """
import sys, time
from ckdist.comm.world import start_world
world = start_world()
if world.rank != 1:
    own = {"from": world.rank, "data": bytes(200000) if world.rank else b""}
    answers = world.collect(own, 1.0)
    print(answers if world.rank else [v and (v["from"], len(v["data"])) for v in answers])
world.gather(None)
world.close()
"""
    done_ = run_ranks(3, "-c", code, timeout=40)
    assert done_.returncode == 0 and "[(0, 0), None, (2, 200000)]" in done_.stdout, done_.stdout + done_.stderr


def test_clocks_of_hosts_are_put_in_line():
    ahead = 5_000_000_000  # of rank 1's clock

    def world(rank):
        def gather(_):
            time.sleep(0.0002)
            now = time.monotonic_ns()
            time.sleep(0.0002)
            return [now, now + ahead, now]

        return SimpleNamespace(rank=rank, hosts=("one", "two", "one"), broadcast=lambda value: value, gather=gather)

    offset, error = clock_offset(world(1))
    assert abs(offset + ahead) <= error and 0 < error < 50_000_000
    assert clock_offset(world(2)) == (0, 0)
    assert clock_offset(SimpleNamespace(rank=1, hosts=("one", "one"))) == (0, 0)


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    trace = Trace(str(folder / "t.json"), SingleWorld(), threads=1)
    shutil.rmtree(folder)
    trace.save_own([])
    assert f"the trace could not be written to {folder}/t.json: No such file" in caplog.text
