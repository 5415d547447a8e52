"""The numbers of a model that a simulated training needs, from the model's traced program."""

import math

from ckdist.layout import SINGLE
from ckdist.layouts.rough_cost import PRODUCTS
from ckdist.mesh import Mesh
from ckdist.models.decoder import main_forward
from ckdist.models.spec import Attention, LatentAttention, ModelSpec
from ckdist.plan.simulated_training import TrainedModel
from ckdist.program.program import Weight
from ckdist.program.tracer import trace


def trained_model(spec: ModelSpec) -> TrainedModel:
    """Returns a model's numbers, counted over the matrix products of its program."""
    program, active = trace(main_forward(spec), spec, SINGLE, Mesh()), 0.0
    for instr in program.instrs:
        for weight in instr.weights if instr.op in PRODUCTS else ():
            if weight is not None and len(weight.dims) > 1:
                taken = instr.inputs[1].dims[-1].count / weight.dims[0].count if len(weight.dims) > 2 else 1.0
                active += taken * _elements(weight)
    return TrainedModel(
        parameters=sum(map(_elements, program.weights)),
        active=active,
        layers=len(spec.layers),
        hidden=spec.hidden_size,
        attended=sum(_attended(layer.mixer) for layer in spec.layers),
    )


def _elements(weight: Weight) -> float:
    return float(math.prod(dim.elements or 1 for dim in weight.dims))


def _attended(mixer: object) -> int:
    """Elements of a token's queries and of its attention outputs, over all heads; 0 for linear attention."""
    if isinstance(mixer, Attention):
        return mixer.num_heads * (mixer.head_dim + (mixer.value_dim or mixer.head_dim))
    return mixer.num_heads * (mixer.head_dim + mixer.v_dim) if isinstance(mixer, LatentAttention) else 0
