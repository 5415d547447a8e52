"""The first weights of a model from nothing: drawn name by name, so they do not depend on ranks or on the order of
drawing.
"""

import math
import zlib

import numpy as np

from ckdist.models.spec import ModelSpec

_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def generator_of(name: str, seed: int) -> np.random.Generator:
    """What draws the first values of weight `name`."""
    return np.random.default_rng((seed, zlib.crc32(name.encode())))


def initial_weight(name: str, shape: tuple[int, ...], spec: ModelSpec, std: float, seed: int) -> np.ndarray:
    """Norms are 1, biases 0, matrices normal of `std`; those that write to the residual stream by 1 / sqrt(2 layers)
    less (Radford et al. 2019, Language Models are Unsupervised Multitask Learners, section 2.3).
    """
    if len(shape) == 1:
        return np.zeros(shape, np.float32) if name.endswith("bias") else np.ones(shape, np.float32)
    scale = std / math.sqrt(2 * len(spec.layers)) if name.endswith(_RESIDUAL) else std
    values = generator_of(name, seed).standard_normal(shape, np.float32)
    return np.multiply(values, np.float32(scale), out=values)


def initial_matrix(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A: uniform within 1 / sqrt(inputs), as PEFT; B: zeros, so that training starts from the base."""
    if ".lora_B." in name:
        return np.zeros(shape, np.float32)
    bound = shape[-1] ** -0.5
    return generator_of(name, seed).uniform(-bound, bound, shape).astype(np.float32)
