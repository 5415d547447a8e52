"""Predicts decode with drafts: tokens per second, and the number of drafted tokens of a step that pays.

Each of n sequences has k drafted tokens. A token is right with probability a if those before it are:

    tokens per second = n * (1 + a + ... + a^k) / (step of n * (1 + k) rows + k * drafter's step of n rows)
"""

from dataclasses import replace

from ckdist.engine.drafting import MOST_SEQUENCES
from ckdist.errors import ConfigError
from ckdist.models.decoder import EMBEDDING, OUTPUT, weight_shapes
from ckdist.models.predictor import predictor
from ckdist.plan.predict import Predictor, Rate
from ckdist.plan.step_shape import Chunks, StepShape
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.predictor_weights import open_predictor

UNNAMED = "qwen3next", "qwen35", "qwen35moe", "mimo_v2_flash"  # their config.json does not name the layer


def layer_of(model: Checkpoint) -> Checkpoint:
    """The layer that predicts tokens, as a model. Without weights, its types are those of the model's last layer.

    Raises ConfigError if there is none.
    """
    if model.format != "config":
        return open_predictor(model)
    if not model.metadata.get("num_nextn_predict_layers") and model.spec.family not in UNNAMED:
        raise ConfigError(
            f"--spec mtp needs layers that predict tokens, and {model.path.name} names none: use --spec suffix, or "
            "set num_nextn_predict_layers"
        )
    spec = predictor(model.spec)
    last = f"model.layers.{len(model.spec.layers) - 1}."
    other = model.tensors.get(f"{last}self_attn.o_proj.weight", model.tensors[EMBEDDING])
    tensors = {name: model.tensors[name] for name in (EMBEDDING, OUTPUT) if name in model.tensors}
    for name in weight_shapes(spec):
        tensors.setdefault(name, model.tensors.get(name.replace("model.layers.0.", last), other))
    return replace(model, spec=spec, tensors=tensors)


def drafted(
    target: Predictor, draft: Checkpoint | None, acceptance: float, most: int, sequences: int, context: int
) -> tuple[int, Rate]:
    """(drafted tokens of each sequence in a step, decode of all sequences with them). 0 tokens: no number pays.

    Args:
        draft: The model or layer that drafts, sharded as `target` is; it has no stages. None: drafts take no time.
        acceptance: Probability that a drafted token is right if those before it are.
        most: Most drafted tokens of a sequence in a step.
    """
    best = 0, target.decode(sequences, context)
    each, seconds = -(-sequences // target.way.replicas), 0.0
    if each > MOST_SEQUENCES or (target.way.stages > 1 and draft is not None):
        return best
    if draft is not None:
        own = Predictor(replace(target.question, checkpoint=draft, made={}), target.way)
        seconds = own.seconds(StepShape.decode(each, context))
    right = 1.0
    for count in range(1, most + 1):
        right += acceptance**count
        shape = StepShape((Chunks(each, 1 + count, context),), each * (1 + count))
        took = target.seconds(shape) + count * seconds
        if sequences * right / took > best[1].tokens:
            best = count, Rate(sequences * right / took, took, target.step(shape), best[1].seen)
    return best
