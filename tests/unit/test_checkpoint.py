"""Fingerprints: any change shows, and the sharding does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from plurax.checkpoint import fingerprint

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_one(dtype):
    values = jnp.arange(24).reshape(2, 3, 4).astype(dtype)
    assert int(fingerprint(values)) == int(fingerprint(values))
    assert int(fingerprint(values)) != int(
        fingerprint(values.at[1, 2, 3].set(jnp.zeros((), dtype)))
    )


@pytest.mark.usefixtures("x64")
def test_float64_too():
    values = jnp.linspace(0, 1, 7)
    assert values.dtype == jnp.float64
    assert int(fingerprint(values)) != int(fingerprint(values.at[3].add(1e-15)))


@given(st.integers(0, 63), st.integers(0, 31))
def test_any_flipped_bit_shows(place, bit):
    words = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
    other = words.copy()
    other[place] ^= np.uint32(1) << np.uint32(bit)
    assert int(fingerprint(jnp.asarray(words))) != int(fingerprint(jnp.asarray(other)))


def test_swapped_rows_show():
    values = jax.random.normal(jax.random.key(0), (8, 4))
    assert int(fingerprint(values)) != int(fingerprint(values[::-1]))


def test_it_does_not_depend_on_the_sharding():
    values = jax.random.normal(jax.random.key(0), (8, 8))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    prints = {
        int(jax.jit(fingerprint)(jax.device_put(values, NamedSharding(mesh, spec))))
        for spec in (P(), P("a"), P("b", "a"), P(("a", "b")), P(None, "b"))
    }
    assert len(prints) == 1
