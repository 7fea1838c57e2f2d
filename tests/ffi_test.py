"""The shared library as a process meets it: environment variables, missing or foreign files, threads."""

import hashlib
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from pjax.ops import ffi

ROOT = pathlib.Path(__file__).parent.parent

PRELUDE = """
import warnings, jax, jax.numpy as jnp, numpy as np
from pjax import ops
from pjax.weights import Ffn
rng = np.random.default_rng(0)
weights = [jnp.asarray(rng.standard_normal((1500, 257)) / 16, jnp.bfloat16) for _ in range(3)]
ffn, x = Ffn(*weights), jnp.asarray(rng.standard_normal((3, 257)), jnp.float32)
def run(implementation=None):
    mask = jnp.asarray(np.random.default_rng(1).random((3, 1500)) < 0.4)
    return np.asarray(ops.sparse_ffn(x, ffn, mask, activation="relu", implementation=implementation))
"""

SAVE = "import sys; np.save(sys.argv[1], run('cpu'))"

WARNING = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first = run()
    ops.matvec(x, ffn.up)
print(*[str(w.message) for w in caught], sep="\\n")
assert np.array_equal(first, run("reference"))
try:
    run("cpu")
except RuntimeError as error:
    print(error)
"""


def run_python(code, *args, **environment):
    """Output of a fresh process; the failures' text is in the assertion."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *args], env=variables, capture_output=True, text=True
    )
    return done.stdout if done.returncode == 0 else done.stderr


def test_every_instruction_set_agrees(tmp_path):
    flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    levels = [
        "portable",
        *(["avx2"] if "avx2" in flags else []),
        *(["avx512"] if "avx512bw" in flags else []),
        *(["avx512vnni"] if "avx512_vnni" in flags else []),
    ]
    results = []
    for level in levels:
        path = tmp_path / f"{level}.npy"
        assert run_python(SAVE, str(path), PJAX_CPU=level) == ""
        results.append(np.load(path))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-4, atol=1e-4)
    if len(levels) < 4:
        pytest.skip(f"this machine has only {levels}")


def test_the_number_of_threads_does_not_change_a_bit(tmp_path):
    digests = set()
    for num_threads in (1, 2, 3, 4):
        path = tmp_path / f"{num_threads}.npy"
        assert run_python(SAVE, str(path), PJAX_NUM_THREADS=str(num_threads)) == ""
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_import_loads_no_library():
    code = "assert 'libpjax_cpu' not in open('/proc/self/maps').read(); print('clean')"
    assert run_python(code) == "clean\n"


@pytest.mark.parametrize(
    ("variable", "value"), [("PJAX_CPU", "avx1024"), ("PJAX_NUM_THREADS", "0"), ("PJAX_NUM_THREADS", "two")]
)
@pytest.mark.parametrize("call", ["run()", "ops.matvec(x, ffn.up)", "import pjax; pjax.LLM('a model')"])
def test_wrong_settings_are_refused(variable, value, call):
    error = run_python(call, **{variable: value}).splitlines()[-1]  # without a note of JAX's below it
    assert error.startswith(f"ValueError: {variable}: expected")
    assert f"got '{value}'" in error


def test_a_missing_library_warns_once_and_runs_the_reference(tmp_path):
    lines = run_python(WARNING, PJAX_LIBRARY=str(tmp_path / "nothing.so")).splitlines()
    assert len(lines) == 2
    assert "slow reference" in lines[0] and "missing" in lines[0]
    assert lines[1].startswith('implementation: "cpu" was asked for, but') and "missing" in lines[1]


def test_a_broken_library_warns_once_and_runs_the_reference(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    lines = run_python(WARNING, PJAX_LIBRARY=str(broken)).splitlines()
    assert len(lines) == 2
    assert f"{broken} does not load" in lines[0]


def test_a_library_for_a_newer_jaxlib_warns_and_runs_the_reference():
    older = "from pjax.ops import ffi; ffi._jaxlib_ffi_version = lambda: (0, 1)\n"
    lines = run_python(older + WARNING).splitlines()
    assert len(lines) == 2
    assert "was built for XLA FFI 0." in lines[0] and "offers 0.1" in lines[0]


def test_the_headers_version_is_found():
    major, minor = ffi._jaxlib_ffi_version()
    assert (major, minor) >= (0, 3)
