"""How a router's logits choose experts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Routing:
    """Which experts a token takes, and with what share each.

    Scores are the softmax or the sigmoid of the logits. The `used` experts with the highest scores (and correction)
    are chosen; of equal ones the first. With `groups`, these are of the `top_groups` groups whose best `group_scores`
    scores have the highest sum. Shares are the scores of the chosen, over their sum where `renormalise`, times `scale`.
    """

    used: int
    scores: str = "softmax"  # softmax, sigmoid
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_scores: int = 2
