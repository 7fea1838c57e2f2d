"""Memory that JAX takes over: where it begins, and that nothing is copied or changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax.memory import aligned_empty, on_large_pages


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1 << 20,), (700, 1024)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_aligned_empty(shape, dtype):
    """JAX keeps the address."""
    array = aligned_empty(shape, np.dtype(dtype))
    assert (array.shape, array.dtype) == (shape, dtype) and array.flags.c_contiguous
    array[...] = 3
    alignment = 64 if array.nbytes < 2 << 20 else 2 << 20
    assert array.size == 0 or array.ctypes.data % alignment == 0
    if array.nbytes:
        assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_on_large_pages(size):
    array = jnp.arange(size, dtype=jnp.float32)
    moved = on_large_pages(array)
    np.testing.assert_array_equal(moved, array)
    assert moved.devices() == array.devices()
    assert (moved is array) == (size == 10)
    assert size == 10 or moved.unsafe_buffer_pointer() % (2 << 20) == 0


def test_on_large_pages_keeps_the_device():
    array = jax.device_put(jnp.ones(1 << 20), jax.devices()[1])
    assert on_large_pages(array).devices() == {jax.devices()[1]}
