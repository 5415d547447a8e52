"""What the training loop asks of the executable that computes losses and gradients."""

from typing import Protocol

from ckdist.train.arena import Arena
from ckdist.train.batch import PackedBatch


class TrainingExecutable(Protocol):
    """One rank's part of a replica: all of it, or the layers of a stage.

    Parameters and gradients are float32 by Hugging Face names, each in one arena, laid out alike.

    Gradients are of the SUM of the losses of all tokens with a target, over the batches since `zero_grad`, with the
    load-balancing loss where the model has a coefficient of it. `balance`: of the last `forward_backward`, that loss
    times the targets, without the coefficient.
    """

    parameters: Arena
    gradients: Arena
    balance: float
    waited: float  # seconds of the last call for other stages

    def forward(self, batch: PackedBatch, chunk: int, slot: int) -> None:
        """The forward pass of a chunk without the loss; what its backward pass reads is kept in one of its slots."""
        ...

    def forward_backward(self, batch: PackedBatch, reduce: bool, chunk: int = 0, slot: int = 0) -> float:
        """This rank's sum of losses; its gradients are added to `gradients`. Of a chunk without the loss 0, and the
        gradients are of what `forward` left in the slot.

        With `reduce`, a collective call, `gradients` is then the sum over all replicas.
        """
        ...

    def loss(self, batch: PackedBatch) -> float:
        """This rank's sum of losses, forward alone."""
        ...

    def flush(self) -> None:
        """Waits until other stages have all that was sent; called before other collective calls, since what is on its
        way needs its sender's turns. CommError when a rank died or stalled.
        """
        ...

    def zero_grad(self) -> None:
        """The next `forward_backward` begins its gradients anew; what `gradients` hold until then says nothing."""
        ...
