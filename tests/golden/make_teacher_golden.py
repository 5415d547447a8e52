"""Makes tests/golden/teacher.npz: losses and gradients of a teacher's divergence by PyTorch in float64.

    pip install ckdist[golden] && python tests/golden/make_teacher_golden.py

Batch 0 of training/batches.npz. Of each case NAME:
    NAME/ids, logprobs   int32, float32 (tokens, choices): the teacher's most probable tokens, ids ascending
    NAME/loss            float64: sum over targets of (1 - weight) * cross-entropy + weight * temperature^2 * divergence
    NAME/norm/W, rows/W, columns/W  of some gradients, as in make_training_golden.py
"""

import numpy as np
import torch
from make_training_golden import GOLDEN, OUT, computing_in, gradients, in_float64

CHOICES = 8
CASES = {"all": ("llama3", 1.0, 1.0), "part": ("llama3", 0.6, 1.0), "warm": ("llama3", 0.6, 2.0)}
CASES |= {"alone": ("llama3", 1.0, 2.0), "capped": ("gemma2", 0.6, 1.0)}
SHOWN = ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight")


def events(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the choices, then of all other tokens together: (tokens, choices + 1)."""
    others = logprobs.scatter(1, ids, float("-inf")).logsumexp(1, keepdim=True)
    return torch.cat([logprobs.gather(1, ids), others], 1)


def main() -> None:
    with np.load(OUT / "batches.npz") as stored:
        given, targets, starts = (stored[name][0] for name in ("token_ids", "targets", "starts"))
    arrays = {}
    for name, (family, weight, temperature) in CASES.items():
        model = in_float64(family)
        logits = torch.from_numpy(np.random.default_rng(9).normal(0, 2.5, (len(given), model.config.vocab_size)))
        teacher = (logits / temperature).log_softmax(1)
        ids = teacher.topk(CHOICES, 1).indices.sort(1).values
        arrays[f"{name}/ids"] = ids.numpy().astype(np.int32)
        arrays[f"{name}/logprobs"] = teacher.gather(1, ids).numpy().astype(np.float32)
        total = 0.0
        for begin, end in zip(starts[:-1], starts[1:]):
            own, wanted = (torch.from_numpy(x[begin:end]).long() for x in (given, targets))
            with computing_in(torch.float64):
                out = model(own[None], use_cache=False).logits[0]
            learned, part = wanted >= 0, slice(begin, end)
            soft = (out / temperature).log_softmax(1)
            apart = torch.nn.functional.kl_div(
                events(soft, ids[part])[learned],
                events(teacher[part], ids[part])[learned],
                reduction="sum",
                log_target=True,
            )
            hard = torch.nn.functional.cross_entropy(out, wanted, ignore_index=-1, reduction="sum")
            total = total + (1 - weight) * hard + weight * temperature**2 * apart
        total.backward()
        arrays[f"{name}/loss"] = total.detach().numpy()
        shown = {key: a for key, a in gradients(model).items() if key.partition("/")[2] in SHOWN}
        arrays |= {f"{name}/{key}": array for key, array in shown.items()}
    np.savez_compressed(GOLDEN / "teacher.npz", **arrays)


if __name__ == "__main__":
    main()
