"""The interface of the executable that computes losses and gradients for the training loop."""

from typing import Protocol

from ckdist.train.arena import Arena
from ckdist.train.batch import PackedBatch


class TrainingExecutable(Protocol):
    """One rank's part of a replica: the whole model, or the layers of a stage.

    Parameters and gradients are float32 by Hugging Face names, each in one arena with the same layout. Gradients are of
    the SUM of losses over all tokens with a target and all batches since `zero_grad`. The sum includes the
    load-balancing loss if the model has a coefficient for it.

    Attributes:
        parameters: This rank's shards of the trained weights.
        gradients: Their gradients.
        balance: Load-balancing loss of the last `forward_backward`, times its targets, without the coefficient.
        waited: Seconds that the last call waited for other stages.
    """

    parameters: Arena
    gradients: Arena
    balance: float
    waited: float

    def forward(self, batch: PackedBatch, chunk: int, slot: int) -> None:
        """Runs the forward pass of a chunk without the loss. A slot keeps the values that its backward pass reads."""
        ...

    def forward_backward(self, batch: PackedBatch, reduce: bool, chunk: int = 0, slot: int = 0) -> float:
        """Adds this rank's gradients to `gradients` and returns its sum of losses.

        For a chunk without the loss it returns 0, and the gradients belong to the values that `forward` left in the
        slot. With `reduce`, a collective call, `gradients` is then the sum over all replicas.
        """
        ...

    def loss(self, batch: PackedBatch) -> float:
        """Returns this rank's sum of losses without computing gradients."""
        ...

    def flush(self) -> None:
        """Waits until other stages have received all that was sent. Raises CommError if a rank died or stalled.

        It is called before other collective calls: messages under way progress only while their sender takes part.
        """
        ...

    def zero_grad(self) -> None:
        """Makes the next `forward_backward` overwrite the gradients. Until then their values are undefined."""
        ...
