"""The loss of training."""

from ckdist.errors import ConfigError
from ckdist.models.decoder import final_norm, head, hidden
from ckdist.models.spec import ModelSpec
from ckdist.program.program import Value
from ckdist.program.training_tracer import TrainingTracer


def loss(g: TrainingTracer, ids: Value, targets: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids and targets (-1: no target) -> the sum of losses over the tokens of all ranks.

    It includes the load-balancing loss of experts.
    """
    if not spec.generates:
        raise ConfigError(f"{spec.family} is an encoder: it can be served, not trained; choose another model")
    if spec.encoder is not None:
        raise ConfigError(f"{spec.family} has an encoder: it can be served, not trained; choose another model")
    if spec.shares_layers or any(layer.scalar for layer in spec.layers):
        raise ConfigError(f"{spec.family} can be served, not trained: its layers have parts without gradients")
    x = g.scale(final_norm(g, hidden(g, ids, spec), spec), spec.logit_scale)
    total = g.cross_entropy(x, targets, head(g, spec), spec.logit_soft_cap)
    if spec.balance_coefficient:
        total = g.add(total, g.balance_loss(targets, spec.balance_coefficient))
    return g.reduce(total)
