"""The numbers of a model that a simulated training needs, from the model's traced program."""

from ckdist.layout import SINGLE
from ckdist.layouts.rough_cost import active_elements
from ckdist.mesh import Mesh
from ckdist.models.decoder import main_forward
from ckdist.models.spec import Attention, LatentAttention, ModelSpec
from ckdist.plan.simulated_training import TrainedModel
from ckdist.program.tracer import trace


def trained_model(spec: ModelSpec) -> TrainedModel:
    """Returns a model's numbers, counted over the matrix products of its program."""
    program = trace(main_forward(spec), spec, SINGLE, Mesh())
    return TrainedModel(
        parameters=float(sum(weight.elements for weight in program.weights)),
        active=active_elements(program),
        layers=len(spec.layers),
        hidden=spec.hidden_size,
        attended=sum(_attended(layer.mixer) for layer in spec.layers),
        keys=sum(_keys(layer.mixer) for layer in spec.layers),
    )


def _attended(mixer: object) -> int:
    """Elements of a token's queries and of its attention outputs, over all heads; 0 for linear attention."""
    if isinstance(mixer, Attention):
        return mixer.num_heads * (mixer.head_dim + (mixer.value_dim or mixer.head_dim))
    return mixer.num_heads * (mixer.head_dim + mixer.v_dim) if isinstance(mixer, LatentAttention) else 0


def _keys(mixer: object) -> int:
    """Elements of a token's keys and values, over all heads, as a training makes them; 0 for linear attention."""
    if isinstance(mixer, Attention):
        return mixer.num_kv_heads * (mixer.head_dim + (mixer.value_dim or mixer.head_dim))
    return mixer.num_heads * (mixer.head_dim + mixer.v_dim) if isinstance(mixer, LatentAttention) else 0
