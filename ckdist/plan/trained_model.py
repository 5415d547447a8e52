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
        attended=sum(_widths(layer.mixer)[0] for layer in spec.layers),
        keys=sum(_widths(layer.mixer)[1] for layer in spec.layers),
    )


def _widths(mixer: object) -> tuple[int, int]:
    """Elements of a token's queries and attention outputs, and of its keys and values, as a training makes them.

    Both are over all heads, and 0 for linear attention.
    """
    if isinstance(mixer, Attention):
        each = mixer.head_dim + (mixer.value_dim or mixer.head_dim)
        return mixer.num_heads * each, mixer.num_kv_heads * each
    if isinstance(mixer, LatentAttention):
        width = mixer.num_heads * (mixer.head_dim + mixer.v_dim)
        return width, width
    return 0, 0
