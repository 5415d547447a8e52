"""The names of weights of routers and experts."""

ROUTER = "gate.weight"
SHARED_GATE = "shared_expert_gate.weight"
CORRECTION = "gate.e_score_correction.bias"
FACTORS = "gate.factors"  # of the experts' shares


def is_router(name: str) -> bool:
    """Whether a weight belongs to a router. Routers compute in float32 and are never quantised."""
    return name.endswith((f".mlp.{ROUTER}", f".mlp.{SHARED_GATE}"))


def is_correction(name: str) -> bool:
    """Whether a weight only affects the selection of experts. It has no gradient."""
    return name.endswith(f".mlp.{CORRECTION}")


def is_of_mixture(name: str) -> bool:
    """Whether a weight or a linear belongs to routed experts or to the shared expert."""
    return ".mlp.experts." in name or ".mlp.shared_expert." in name


def is_expert(name: str) -> bool:
    """Whether a weight is a stack of experts."""
    return ".mlp.experts." in name
