"""How evenly experts are used, as metrics say it."""

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from ckdist.engine.expert_load import expert_stats
from ckdist.serve.metrics import Metrics


def test_a_few_numbers_for_each_layer():
    stats = expert_stats({1: np.array([1, 6, 2, 3]), 12: np.zeros(4, np.int64)})
    assert stats == {
        "expert_rows_total": 12,
        "expert_busiest.layer.1": 1,
        "expert_busiest_rows.layer.1": 6,
        "expert_imbalance.layer.1": 2.0,
        "expert_busiest.layer.12": 0,
        "expert_busiest_rows.layer.12": 0,
        "expert_imbalance.layer.12": 1.0,
    }
    assert expert_stats({}) == {}


def test_layers_are_labels():
    stats = expert_stats({1: np.array([1, 6, 2, 3]), 12: np.array([2, 2, 2, 2])})
    text = Metrics("m", lambda: "ready", lambda: 0, lambda: stats).render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    imbalance = {sample.labels["layer"]: sample.value for sample in families["ckdist_expert_imbalance"].samples}
    assert imbalance == {"1": 2.0, "12": 1.0}
    assert families["ckdist_expert_imbalance"].documentation.startswith("Rows of a layer's busiest expert")
    assert families["ckdist_expert_rows"].samples[0].value == 20
