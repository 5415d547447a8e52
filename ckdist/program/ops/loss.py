"""cross_entropy fused with the output projection, its gradient, and the constant 1 that starts a backward pass.

With a teacher's most probable tokens as operands, the loss also has the divergence from the teacher (teacher_loss).
"""

from typing import TYPE_CHECKING

from ckdist.errors import LayoutError
from ckdist.program.ops.op import lower, op, vjp, whole
from ckdist.program.ops.op_types import Attrs, Gradients, Inferred, Values, Weights
from ckdist.program.program import Instr
from ckdist.program.step import ABSENT, GradientIndex, PackIndex, ValueIndex

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.emitter import Emitter
    from ckdist.program.lower_training import TrainingLowering


def infer_cross_entropy(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The loss, partial if tokens are sharded, and one number per token. A sharded vocabulary makes neither partial.

    Raises LayoutError if the operands do not fit, or the columns of the matrix are sharded.
    """
    (x, targets), (head,) = inputs[:2], weights
    whole("cross_entropy", *inputs)
    _, hidden = head.dims
    if x.dims[-1] != hidden:
        raise LayoutError(f"cross_entropy: %{x.name} ends in [{x.dims[-1]}], {head} reads [{hidden}]")
    if hidden.axis:
        raise LayoutError(f"cross_entropy needs all of {hidden.name}, but {head} is sharded over {hidden.axis}")
    if x.dims[:1] != targets.dims:
        raise LayoutError(
            f"cross_entropy: %{x.name} has rows [{x.dims[0]}], %{targets.name} [{', '.join(map(str, targets.dims))}]"
        )
    per_token = ((x.dims[0],), None)
    return [((), x.dims[0].axis), per_token, *([per_token] if len(inputs) > 2 else [])]


op("cross_entropy", infer_cross_entropy, collective=True)


@lower("cross_entropy", "training")
def lower_cross_entropy(lowering: "TrainingLowering", instr: Instr) -> None:
    """Emits one step. None if there is a gradient: its step computes the loss too."""
    if lowering.graph.readers(instr.outputs[1]):
        return
    lowering.emit(
        "cross_entropy",
        x=lowering.operand(instr.inputs[0]),
        dx=ValueIndex(ABSENT),
        head=lowering.pack(False, instr.weight(0)),
        head_transposed=PackIndex(ABSENT),
        gradient=GradientIndex(ABSENT),
        fresh=False,
        soft_cap=instr.attrs["soft_cap"],
        first_row=instr.weight(0).dims[0].span(lowering.mesh)[0],
        **_teacher_fields(instr),
    )


def _teacher_fields(instr: Instr) -> dict[str, float]:
    """The fields of the step that a teacher's operands change."""
    choices = instr.inputs[-2].dims[-1].elements if "teacher_weight" in instr.attrs else 0
    return {
        "target_weight": instr.attrs.get("target_weight", 1.0),
        "teacher_weight": instr.attrs.get("teacher_weight", 0.0),
        "choices": choices,
    }


@vjp("cross_entropy")
def cross_entropy_vjp(g: "Emitter", instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of x and the matrix. Raises LayoutError if the log-sum-exp has a gradient."""
    if grads[0] is None or any(grad is not None for grad in grads[1:]):
        raise LayoutError(
            f"cross_entropy has no gradient through its log-sum-exp %{instr.outputs[1].name}; only through the loss"
        )
    (x, targets, *teacher), head, names = instr.inputs, instr.weight(0), ["d_logits"]
    if wanted[-1]:
        names.append(f"d_{head.name}")
    # The operands of a teacher: the ratio of the rest, ids, log-probabilities.
    operands = (x, targets, instr.outputs[1], grads[0], *instr.outputs[2:], *teacher)
    dx, *dw = g.emit("cross_entropy_grad", operands, (head,), names, **instr.attrs, weight_grad=wanted[-1])
    return [dx, *[None] * (len(instr.inputs) - 1), *(dw or [None])]


def infer_cross_entropy_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x, partial if the vocabulary is sharded, and those of the matrix if its gradient is wanted."""
    x, _, _, d_loss = inputs[:4]
    _, partial = infer_cross_entropy(inputs[:2], weights, attrs)[0]
    if d_loss.dims:
        raise LayoutError(
            f"cross_entropy_grad needs a number, but %{d_loss.name} is [{', '.join(map(str, d_loss.dims))}]"
        )
    outputs: Inferred = [(x.dims, weights[0].dims[0].axis)]
    return [*outputs, (weights[0].dims, partial)] if attrs["weight_grad"] else outputs


op("cross_entropy_grad", infer_cross_entropy_grad)


@lower("cross_entropy_grad", "training")
def lower_cross_entropy_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """Emits one step for the loss and its gradients."""
    head, (dx, *d_head) = instr.weight(0), instr.outputs
    lowering.emit(
        "cross_entropy",
        x=lowering.operand(instr.inputs[0]),
        dx=lowering.output(dx),
        head=lowering.pack(False, head),
        head_transposed=lowering.pack(True, head),
        gradient=lowering.gradient(d_head[0]) if d_head else GradientIndex(ABSENT),
        fresh=bool(d_head) and lowering.is_fresh(d_head[0]),
        soft_cap=instr.attrs["soft_cap"],
        first_row=head.dims[0].span(lowering.mesh)[0],
        **_teacher_fields(instr),
    )


def infer_one(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """A scalar."""
    return [((), None)]


op("one", infer_one)


@lower("one", "training")
def lower_one(lowering: "TrainingLowering", instr: Instr) -> None:
    """No step: the steps of gradients have the factor 1 built in."""
