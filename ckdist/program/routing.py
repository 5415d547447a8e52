"""The rule that selects experts from a router's logits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Routing:
    """The experts of a token, and the weight (share) of each.

    Scores are the softmax, the sigmoid, or the square root of the softplus of the logits. The `used` experts with the
    highest score (plus correction) are chosen; equal scores go to the lower index. With `groups`, only experts of the
    `top_groups` groups are candidates: those with the highest sum of their best `group_scores` scores. The share of a
    chosen expert is scale * score, divided by the sum of the chosen scores if `renormalise`.
    """

    used: int
    scores: str = "softmax"  # softmax, sigmoid, sqrt_softplus
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_scores: int = 2
