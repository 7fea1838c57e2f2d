"""Copying weights out of mapped files: the right numbers, JAX's own memory, and nothing of the file kept."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pjax.formats.checkpoint import SourceTensor
from pjax.formats.mapped import drop_pages, load_array, map_file
from pjax.formats.stored import open_safetensors

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
# Beyond one tile and one piece both ways, and no multiple of either.
SHAPES = [(0,), (5,), (0, 3), (3, 0), (1, 1), (67, 1100), (1100, 67), (2300, 1030)]


def _open(tmp_path, array, layout=lambda array: array) -> SourceTensor:
    save_file({"x": array}, tmp_path / "x.safetensors")
    tensor = open_safetensors(tmp_path / "x.safetensors")["x"]
    shape = layout(np.empty(array.shape)).shape
    return tensor._replace(read=lambda: layout(tensor.read()), shape=shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_all_types_and_ways(tmp_path, shape, stored):
    """Each pair of types as JAX itself converts them, as the weight lies in the file and turned."""
    array = np.random.default_rng(0).normal(size=shape).astype(stored)
    for layout in (lambda array: array, np.transpose):
        tensor = _open(tmp_path, array, layout)
        for dtype in DTYPES:
            found = load_array(tensor, np.dtype(dtype))
            expected = np.asarray(jnp.asarray(layout(array)).astype(dtype))
            assert found.dtype == expected.dtype and found.flags.c_contiguous and not found.flags.writeable
            np.testing.assert_array_equal(found, expected)


def test_jax_takes_the_memory_over(tmp_path):
    """No second copy: the array on the device is the one that was filled."""
    array = np.ones((300, 70), np.float32)
    for layout in (lambda array: array, np.transpose, lambda array: array[3:9, 5:]):
        found = load_array(_open(tmp_path, array, layout), np.dtype(ml_dtypes.bfloat16))
        assert jax.device_put(found).unsafe_buffer_pointer() == found.ctypes.data


def test_special_values(tmp_path):
    """Infinities and NaN stay; what only float16 cannot hold is an error that names the tensor."""
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-7], np.float32)
    for stored in DTYPES:
        for dtype in DTYPES:
            found = load_array(_open(tmp_path, special.astype(stored)), np.dtype(dtype))
            expected = special.astype(stored).astype(dtype)
            np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    for stored in (np.float32, ml_dtypes.bfloat16):
        tensor = _open(tmp_path, np.array([1.0, 1e6]).astype(stored))
        with pytest.raises(ValueError, match=r"x.safetensors: x holds values beyond float16's range"):
            load_array(tensor, np.dtype(np.float16))


def test_a_file_that_shrinks(tmp_path):
    """Reading what was cut off after opening is an error, not the end of the process."""
    tensor = _open(tmp_path, np.ones((100, 100), np.float32))
    os.truncate(tmp_path / "x.safetensors", 5000)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "x.safetensors")) + ": had 4.* 5000 now"):
        load_array(tensor, np.dtype(np.float32))


def test_dropped_pages_are_read_again(tmp_path):
    """Dropping changes nothing but memory, also of what never was a file."""
    content = np.random.default_rng(0).bytes(50_000)
    (tmp_path / "x").write_bytes(content)
    view = map_file(tmp_path / "x")
    for part in (view, view[1:100], view[3:40_003:2], view[:0], np.ones(9), np.zeros(())):
        before = part.copy()
        drop_pages(part)
        np.testing.assert_array_equal(part, before)
    (tmp_path / "empty").write_bytes(b"")
    assert map_file(tmp_path / "empty").shape == (0,)


_PEAK = """
import sys
from pathlib import Path
import numpy as np
from pjax.formats.mapped import load_array
from pjax.formats.stored import open_safetensors

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

tensors = open_safetensors(Path(sys.argv[1]))
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
turned = [tensor._replace(read=lambda t=tensor: t.read().T) for tensor in tensors.values()]
arrays = [load_array(tensor, tensor.dtype) for tensor in turned]
print((memory("VmHWM") - before) / sum(array.nbytes for array in arrays))
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux keeps the figure, no other does"
)
def test_peak_memory_is_that_of_the_weights(tmp_path):
    """The file's pages leave as they are copied; without that the figure is 2."""
    array = np.ones((2048, 4096), np.float16)
    save_file({str(i): array for i in range(4)}, tmp_path / "x.safetensors")
    command = [sys.executable, "-c", _PEAK, str(tmp_path / "x.safetensors")]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert 0.9 < float(found.stdout) < 1.3
