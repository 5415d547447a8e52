"""The loss of training."""

from ckdist.errors import ConfigError
from ckdist.layout import Dim
from ckdist.models.decoder import SCORE, final_norm, head, hidden
from ckdist.models.spec import ModelSpec
from ckdist.program.program import Value, Weight
from ckdist.program.training_tracer import TrainingTracer


def loss(g: TrainingTracer, ids: Value, targets: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids and targets (-1: no target) -> the sum of losses over the tokens of all ranks.

    It includes the load-balancing loss of experts.
    """
    if not spec.generates:
        raise ConfigError(f"{spec.family} is an encoder: it can be served, not trained; choose another model")
    if spec.encoder is not None:
        raise ConfigError(f"{spec.family} has an encoder: it can be served, not trained; choose another model")
    if spec.shares_values or spec.norm == "unit" or any(layer.scalar for layer in spec.layers):
        raise ConfigError(f"{spec.family} can be served, not trained: its layers have parts without gradients")
    if g.labels:
        x = g.cross_entropy(final_norm(g, hidden(g, ids, spec), spec), targets, _score_head(g, spec), 0.0)
        return g.reduce(x)
    x = g.scale(final_norm(g, hidden(g, ids, spec), spec), spec.logit_scale)
    total = g.cross_entropy(x, targets, head(g, spec), spec.logit_soft_cap)
    if spec.balance_coefficient:
        total = g.add(total, g.balance_loss(targets, spec.balance_coefficient))
    return g.reduce(total)


def _score_head(g: TrainingTracer, spec: ModelSpec) -> Weight:
    """The head of a sequence classifier: a row for each label."""
    return g.weight(SCORE, Dim("labels", g.labels), g.sharding.hidden(spec.hidden_size))
