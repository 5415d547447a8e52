"""The initial weights of a new model. Each name has its own generator, so they do not depend on ranks or on order."""

import math
import zlib

import numpy as np

from ckdist.models.spec import ModelSpec
from ckdist.train.moments import is_kernel

_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
KERNEL = 0.5  # the bound of torch.nn.Conv1d for kernels of four tokens, 1 / sqrt(4)
MOST_RATE = 16.0


def generator_of(name: str, seed: int) -> np.random.Generator:
    """The generator of the initial values of weight `name`."""
    return np.random.default_rng((seed, zlib.crc32(name.encode())))


def initial_weight(name: str, shape: tuple[int, ...], spec: ModelSpec, std: float, seed: int) -> np.ndarray:
    """Norms are 1, biases 0, matrices normal with standard deviation `std`.

    Matrices that write to the residual stream have std / sqrt(2 * layers) (Radford et al. 2019, Language Models are
    Unsupervised Multitask Learners, section 2.3). Short convolutions and the rates of states begin as in transformers.
    """
    kind = name.rpartition(".")[2]
    if is_kernel(name):
        return generator_of(name, seed).uniform(-KERNEL, KERNEL, shape).astype(np.float32)
    if kind == "A_log":
        return np.log(generator_of(name, seed).uniform(1, MOST_RATE, shape)).astype(np.float32)
    if len(shape) == 1 and kind == "dt_bias":
        return np.ones(shape, np.float32)
    if len(shape) == 1:
        return np.zeros(shape, np.float32) if name.endswith("bias") else np.ones(shape, np.float32)
    scale = std / math.sqrt(2 * len(spec.layers)) if name.endswith(_RESIDUAL) else std
    values = generator_of(name, seed).standard_normal(shape, np.float32)
    return np.multiply(values, np.float32(scale), out=values)


def initial_matrix(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """LoRA's A: uniform in ±1 / sqrt(inputs), as in PEFT. B: zeros, so training starts from the base model."""
    if ".lora_B." in name:
        return np.zeros(shape, np.float32)
    bound = shape[-1] ** -0.5
    return generator_of(name, seed).uniform(-bound, bound, shape).astype(np.float32)
