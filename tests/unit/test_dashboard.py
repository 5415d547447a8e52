"""The Grafana dashboard: every metric that it asks for is one of the server's."""

import json
import re

from ckdist.serve.metrics import MEANINGS, Metrics
from tests.support.paths import ROOT

SUFFIX = re.compile(r"_(bucket|sum|count|total)$")


def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads((ROOT / "launch/grafana/ckdist.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"ckdist_\w+", target["expr"])
    }
    own = Metrics("m", lambda: "ready", lambda: 0, dict).registry.collect()
    known = {family.name for family in own} | {f"ckdist_{SUFFIX.sub('', name)}" for name in MEANINGS}
    assert len(asked) > 15 and not {name for name in asked if SUFFIX.sub("", name) not in known}
