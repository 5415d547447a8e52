"""The trace of a training: every thread of every rank, and the parts of a step."""

import collections
import json

from tests.support.curves import curve
from tests.support.tiny_training import config


def test_a_trace_has_the_parts_and_the_operations_of_each_step(tmp_path):
    path = tmp_path / "trace.json"
    curve(config(tmp_path, max_steps=3, save_steps=2, threads=2, per_device_train_batch_size=3, trace=str(path)), 2)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in (0, 1):
        own = [event for event in events if event["pid"] == rank]
        parts = collections.Counter(event["name"] for event in own if event["tid"] == 0)
        assert parts == {"data": 3, "run": 3, "update": 3, "save": 1}
        steps = [event for event in own if event["cat"] == "replay"]
        assert {event["tid"] for event in steps} == {1, 2} and {event["args"].get("layer") for event in steps} >= {0, 1}
        assert any(event["name"].endswith("o_proj") for event in steps)
        runs = [(e["ts"], e["ts"] + e["dur"]) for e in own if e["name"] == "run"]
        training = [event["ts"] for event in steps if event["ts"] < runs[-1][1]]  # later ones validate
        assert training and all(any(begin <= at <= end for begin, end in runs) for at in training)
