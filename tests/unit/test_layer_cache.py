"""Caches as the ops of a program declare them."""

from dataclasses import replace

import pytest

from ckdist.errors import ConfigError, NativeError
from ckdist.program.cache import CacheArray, LayerCache, block_bytes, slot_bytes
from tests.support.caches import caches_of
from tests.support.specs import LINEAR, spec


def test_each_mixer_names_its_arrays():
    hybrid, latent = (caches_of(spec(**LINEAR[name])) for name in ("gated_delta_net", "latent"))
    assert [[array.name for array in cache.arrays] for cache in (hybrid[0], hybrid[-1], latent[0])] == [
        ["state", "convolution"],
        ["keys", "values"],
        ["latent", "rope"],
    ]
    assert [(array.heads, array.rows, array.width) for array in hybrid[0].arrays] == [(6, 16, 40), (6, 3, 72)]
    assert [(array.heads, array.rows, array.width) for array in latent[0].arrays] == [(1, 1, 32), (1, 1, 16)]


def test_keys_and_values_have_their_own_types():
    keys, values = CacheArray("keys", 2, 64), CacheArray("values", 2, 32)
    both = LayerCache((keys, values))
    assert block_bytes([both], ("f16", "f32")) == 2 * 16 * (64 * 2 + 32 * 4)
    assert block_bytes([both, both], ("f32", "f16")) == 2 * 2 * 16 * (64 * 4 + 32 * 2)
    assert slot_bytes([both]) == 0
    with pytest.raises(ConfigError, match=r"the width of a head \(36\)"):
        block_bytes([LayerCache((keys, replace(values, width=36)))], ("f16", "f16"))
    with pytest.raises(NativeError, match="a layer's cache of 1 arrays has no array 1"):
        block_bytes([LayerCache((keys,))], ("f16", "f16"))


def test_columns_of_a_state_are_whole_vectors():
    """40 columns take 64 floats, and a head takes whole cache lines."""
    (state,) = caches_of(spec(**LINEAR["gated_delta_net"]))[:1]
    assert slot_bytes([state]) == 6 * 4 * -(-(16 * 64 + 3 * 72) // 16) * 16
