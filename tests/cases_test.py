"""Every real-life checkpoint against the logits, greedy ids and active neurons of another implementation."""

import json
import logging
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pjax.executor.common import empty_cache
from pjax.layers import dense_ffn_fn, exact_ffn_fn
from pjax.model import prompt_positions
from pjax.profiler import observed_ffn_fn
from pjax.storage import load_model
from tests.cases import checkpoint_names, find_case

CAUSES = {
    "q_llama_act_unknown": "config.json: hidden_act: .*'swoosh'",
    "q_llama_shard_missing": "model-00002-of-00003.safetensors is missing",
    "q_llama_truncated": "has 173944 bytes, its header promises 174944: an incomplete download",
    "q_llama_unknown_rope": 'config.json: .*rope_type: "su"',
    "q_llama_wrong_shape": r"model.safetensors: .*up_proj.weight: .*\[88, 32\], found \[80, 32\]",
}
"""What the message about each faulty case must name: the file and the cause."""

# Nearly all of the time goes into compiling.
jit = partial(jax.jit, static_argnames="graphdef", compiler_options={"xla_backend_optimization_level": 0})


@jit
def read_prompt(graphdef, state, ids, cache):
    """(logits of every position, cache, tokens for which each neuron of each layer was active)"""
    model = nnx.merge(graphdef, state)
    residual, cache, observed = model.run(ids, prompt_positions(ids), cache, observed_ffn_fn)
    return model.logits(residual), cache, [layer.active_mask.sum(0) for layer in observed]


@jit
def read_token(graphdef, state, ids, position, cache):
    """(best next ids, cache)"""
    model = nnx.merge(graphdef, state)
    ffn_fn = exact_ffn_fn if model.config.is_sparse else dense_ffn_fn
    positions = jnp.broadcast_to(position, (len(ids), 1))
    residual, cache, _ = model.run(ids[:, None], positions, cache, ffn_fn)
    return jnp.argmax(model.logits(residual)[:, 0], -1), cache


def decode(model, ids, num_new):
    """Logits of a prompt [batch, seq, vocab], neurons' active tokens, and greedy ids [batch, num_new]."""
    config, (batch, num_prompt) = model.config, ids.shape
    graphdef, state = nnx.split(model)
    empty = empty_cache(config, model.cache_dtype, config.layers * batch, num_prompt + num_new)
    logits, cache, active = read_prompt(graphdef, state, jnp.asarray(ids), empty)
    new_ids = [jnp.argmax(logits[:, -1], -1)]
    for position in range(num_prompt, num_prompt + num_new - 1):
        best, cache = read_token(graphdef, state, new_ids[-1], jnp.int32(position), cache)
        new_ids.append(best)
    return logits, active, np.stack(new_ids, 1)


def expectation(folder: Path) -> tuple[str, Path]:
    """What a case must do, and the folder whose golden.npz holds."""
    file = folder / "expect.json"
    if not file.exists():
        return "same", folder
    expect = json.loads(file.read_text())
    golden = next(folder.rglob("golden.npz"), None)
    return expect["expect"], golden.parent if golden else find_case(expect["parent"])


@pytest.mark.parametrize("name", checkpoint_names())
def test_case(name, tmp_path, caplog):
    folder = find_case(name)
    expect, golden_folder = expectation(folder)
    if expect == "error":
        with pytest.raises((ValueError, FileNotFoundError), match=CAUSES[name]):
            load_model(folder)
        return
    # A name that all cases share lets those of one shape share their programs, too.
    with caplog.at_level(logging.WARNING):
        model = load_model(shutil.copytree(folder, tmp_path / "model"))
    assert bool(caplog.records) == (expect == "warn"), caplog.text
    golden = np.load(golden_folder / "golden.npz")
    logits, active, new_ids = decode(model, golden["ids"], golden["greedy"].shape[1])
    # The other implementation rounds ALiBi's distances to bfloat16.
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=5e-3 if model.config.alibi else 2e-5)
    if model.config.is_sparse:
        np.testing.assert_array_equal(active, golden["active"])
    np.testing.assert_array_equal(new_ids, golden["greedy"])


def test_every_faulty_case_has_its_cause():
    faulty = {name for name in checkpoint_names() if expectation(find_case(name))[0] == "error"}
    assert faulty <= CAUSES.keys()
