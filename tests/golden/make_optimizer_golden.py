"""Makes tests/golden/optimizer.npz: a few steps of PyTorch's AdamW, SGD and Muon, of transformers' Adafactor as its
Trainer sets it, and of AdamW with moments of 8 bits by their formula; with PyTorch's clipping by the global norm.

Muon's iterations, which PyTorch makes in bfloat16, are made in float32. Vectors have AdamW.

    pip install ckdist[golden] && python tests/golden/make_optimizer_golden.py
"""

import pathlib

import numpy as np

SHAPES = {"a.weight": (5, 37), "a.bias": (5,), "norm.weight": (37,), "b.weight": (19, 5), "c.weight": (23, 31)}
STEPS, CLIP, DECAY = 6, 0.7, 0.1
RATES = {"adamw": 3e-3, "sgd": 0.3, "muon": 3e-3, "adafactor": 3e-3, "adamw_8bit": 3e-3}
BLOCK = 256


def codes(signed: bool):
    """The values of the dynamic map of Dettmers et al. 2021: decades of the middles of equal parts of [0.1, 1]."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = np.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        middles = 10.0 ** (exponent - 6) * (edges[1:] + edges[:-1]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(values).astype(np.float32)


def quantised(x, values):
    """x with each block of 256 as the nearest codes times its element of largest magnitude."""
    import torch

    out = torch.empty_like(x).reshape(-1)
    for own, to in zip(x.reshape(-1).split(BLOCK), out.split(BLOCK), strict=True):
        scale = own[own.abs().argmax()]
        if scale != 0:
            to[:] = values[((own / scale)[:, None] - values).abs().argmin(1)] * scale
        else:
            to[:] = 0
    return out.reshape(x.shape)


def EightBits(groups, lr, betas, eps):
    """torch's AdamW, whose moments are quantised after each step."""
    import torch

    class Optimizer(torch.optim.AdamW):
        def step(self):
            super().step()
            for state in self.state.values():
                for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                    state[name].copy_(quantised(state[name], torch.from_numpy(codes(signed))))

    return Optimizer(groups, lr=lr, betas=betas, eps=eps)


def run(kind: str, first: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    import torch

    weights = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in first.items()}
    groups = [
        {"params": [p for p in weights.values() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in weights.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = lambda: torch.optim.AdamW(groups, lr=RATES[kind], betas=(0.9, 0.95), eps=1e-7)
    # torch's SGD adds the decay to the gradient; decoupled it is a factor before the step.
    if kind == "adafactor":
        from transformers.optimization import Adafactor

        numbers = {"scale_parameter": False, "relative_step": False}
        optimizer = Adafactor(groups, lr=RATES[kind], **numbers)
    elif kind == "adamw_8bit":
        optimizer = EightBits(groups, lr=RATES[kind], betas=(0.9, 0.95), eps=1e-7)
    elif kind == "muon":
        torch.Tensor.bfloat16 = lambda self: self
        matrices, numbers = groups[0]["params"], {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
        optimizer = torch.optim.Muon(matrices, lr=RATES[kind], weight_decay=DECAY, **numbers)
        vectors = torch.optim.AdamW(groups[1:], lr=RATES[kind], betas=(0.9, 0.95), eps=1e-7)
    else:
        optimizer = (
            adamw()
            if kind == "adamw"
            else torch.optim.SGD([{**g, "weight_decay": 0.0} for g in groups], lr=RATES[kind], momentum=0.8)
        )
    for step in gradients:
        for name, p in weights.items():
            p.grad = torch.from_numpy(step[name].copy())
        torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
        if kind == "sgd":
            with torch.no_grad():
                for p in groups[0]["params"]:
                    p.mul_(1 - RATES[kind] * DECAY)
        optimizer.step()
        if kind == "muon":
            vectors.step()
    return {name: p.detach().numpy() for name, p in weights.items()}


def main() -> None:
    rng = np.random.default_rng(0)
    draw = lambda scale: {
        name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()
    }
    first, gradients = draw(1.0), [draw(scale) for scale in (0.01, 1.0, 3.0, 0.02, 0.5, 1e-4)]
    arrays = {f"first/{name}": array for name, array in first.items()}
    for index, step in enumerate(gradients):
        arrays |= {f"gradient{index}/{name}": array for name, array in step.items()}
    for kind in RATES:
        arrays |= {f"{kind}/{name}": array for name, array in run(kind, first, gradients).items()}
    np.savez_compressed(pathlib.Path(__file__).parent / "optimizer.npz", **arrays)


if __name__ == "__main__":
    main()
