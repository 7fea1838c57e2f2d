"""The README's code runs, and its commands and files exist."""

import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_layer_examples_run():
    nnx_block, linen_block = BLOCKS[1:3]
    names: dict = {}
    exec(nnx_block, names)
    assert names["Block"](nnx.Rngs(0))(jnp.ones((2, 512))).shape == (2, 512)
    exec(linen_block, names)
    import jax

    y, _ = names["Mlp"]().init_with_output(jax.random.key(0), jnp.ones((2, 512)))
    assert y.shape == (2, 512) and bool(jnp.isfinite(y).all())


def test_the_model_example_runs_on_the_shipped_model(capsys):
    code = BLOCKS[0].replace("runs/quickstart", str(ROOT / "configs" / "demo"))
    exec(code.replace("max_new_tokens=64", "max_new_tokens=4"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m ([\w.]+)", README))))
def test_commands_exist(module):
    if module == "pjax.evaluate":  # its options are the harness's
        pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed (pjax[eval])")
    result = subprocess.run(
        [sys.executable, "-m", module, "--helpshort"], cwd=ROOT, capture_output=True, text=True
    )
    said = result.stdout + result.stderr
    assert "flags" in said or "usage: lm-eval" in said, result.stderr


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:configs|experiments|tests)/[\w./]+)`", README)))
)
def test_files_exist(path):
    assert (ROOT / path).exists()
