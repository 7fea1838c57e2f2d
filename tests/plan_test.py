"""The plan of memory against what is really allocated: weights, caches, predictors, a prompt's workspace."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pjax import ops
from pjax.base import SignPredictor
from pjax.executor import OneProgram, TwoPrograms
from pjax.executor.common import empty_cache
from pjax.formats import read_checkpoint
from pjax.hardware import hardware_preset
from pjax.layers import SparseFfn
from pjax.placement import layer_neuron_bytes
from pjax.plan import WeightSizes, most_predictor_bytes, plan_memory, plan_rows, weight_sizes
from pjax.predictor import rank_choices, with_dtype
from pjax.sampling import greedy
from pjax.settings import PlacementSettings, PredictorSettings
from pjax.storage import load_model
from tests.cases import find_case
from tests.tiny_model import tiny_config, tiny_decoder, tiny_ids, tiny_predictors

DEMO = hardware_preset("demo")
SIZES = WeightSizes(attention=1000, ends=500, ffn_dtypes=("float32", "q8_0"), embed_dtype="bfloat16")
CONFIG = tiny_config(model=32)
FFN = sum(
    n * size for n, size in zip(CONFIG.neurons, layer_neuron_bytes(CONFIG, SIZES.ffn_dtypes), strict=True)
)


def plan(device_bytes, hardware=DEMO, **wanted):
    return plan_memory(SIZES, CONFIG, hardware, PlacementSettings(device_bytes=device_bytes, **wanted), 77)


@pytest.mark.parametrize(("name", "dtype"), [
    *itertools.product(["llama_gqa", "opt_350m", "falcon_40b_groups", "bamboo_drelu"], [None, "bfloat16"]),
    *itertools.product(["llama_gqa", "opt_base"], ["q8_0", "q4_0"]),
])  # fmt: skip
def test_weights_have_the_planned_bytes(name, dtype):
    folder = find_case(name)
    sizes = weight_sizes(read_checkpoint(folder), dtype)
    model = load_model(folder, dtype=dtype)
    neurons = 0
    for _, module in nnx.iter_modules(model):
        if isinstance(module, SparseFfn):
            neurons += sum(leaf.nbytes for leaf in jax.tree.leaves(module.weights))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert sizes.attention + sizes.ends + neurons == whole
    assert sizes.ends >= model.embed.matrix.nbytes
    assert sizes.ffn_dtypes == tuple(layer.ffn.weights.format for layer in model.layers)


@pytest.mark.parametrize("dtype", ["float32", "q4_0"])
def test_predictors_of_the_highest_rank_have_the_planned_bytes(dtype):
    config = tiny_config(model=64, neurons=(96, 640))
    total = 0
    for neurons in config.neurons:
        template = tiny_predictors(tiny_decoder(), 0.0).layers[0]
        rank = rank_choices(dtype, 64, neurons, 3 * 64 * 4)[-1]
        arrays = (jnp.ones(shape) for shape in ((rank, 64), (neurons, rank), (neurons,)))
        predictor = dataclasses.replace(
            template, **dict(zip(("first", "second", "bias"), arrays, strict=True))
        )
        total += sum(leaf.nbytes for leaf in jax.tree.leaves(with_dtype(predictor, dtype)))
    assert most_predictor_bytes(config, PredictorSettings(dtype=dtype), ("float32",) * 2) == total


def test_signs_have_the_planned_bytes_and_none_has_none():
    config, predictors = tiny_config(model=33), []
    for neurons in config.neurons:
        bits = ops.pack_signs(jnp.ones((neurons, 33)))
        predictors.append(SignPredictor(bits, jnp.float32(1), jnp.zeros(neurons), jnp.float32(0)))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(predictors))
    types = ("float32",) * 2
    assert most_predictor_bytes(config, PredictorSettings(kind="sign"), types) == total
    assert most_predictor_bytes(config, PredictorSettings(kind="none"), types) == 0


def test_the_split_model_stays_within_its_plan():
    model = tiny_decoder()
    predictors, devices = tiny_predictors(model, 0.0), jax.devices()
    masks = tuple(np.arange(n) < 10 for n in model.config.neurons)
    split = TwoPrograms(
        model, masks, mode="predicted", predictors=predictors, device=devices[0], host=devices[1]
    )
    leaves = jax.tree.leaves((nnx.state(model), predictors.layers))
    cold = [4 * 3 * 16 * (n - 10) for n in model.config.neurons]
    assert split.device_bytes == sum(leaf.nbytes for leaf in leaves) - sum(cold)


def test_cache_and_workspace_are_enough_for_a_prompt():
    model = tiny_decoder(context=256, vocab=500)
    sizes = WeightSizes(0, 0, ("float32",) * 2, "float32")
    planned = plan_memory(sizes, model.config, DEMO, PlacementSettings(), 0)
    cache = empty_cache(model.config, model.cache_dtype, model.config.layers, 256)
    assert planned.kv_cache == cache.k.nbytes + cache.v.nbytes
    executor = OneProgram(model)
    arguments = executor._leaves, tiny_ids(1, 256), np.array([256], np.int32), None
    lowered = executor._prefill.lower(*arguments, capacity=256, sample_fn=greedy)
    needed = lowered.compile().memory_analysis().temp_size_in_bytes
    assert needed <= planned.workspace <= 2 * needed


def test_budgets_as_people_write_them():
    needed = plan("max").needed
    assert needed == 77 + 1000 + 500 + plan("max").kv_cache + plan("max").workspace
    assert plan("max").hot == FFN and plan("max").budget == DEMO.device_bytes * 15 // 16
    assert (plan(needed).hot, plan(needed + 10).hot, plan(needed + 2 * FFN).hot) == (0, 10, FFN)
    assert plan("1GiB").budget == plan(2**30).budget == 2**30
    assert plan("1.5 GB").budget == plan("1500MB").budget == 1_500_000_000
    assert plan("40%").hot == int(FFN * 0.4) and plan("40%").budget == needed + int(FFN * 0.4)
    assert (plan(0).hot, plan(0).budget) == (0, 0) == (plan("0").hot, plan("0%").budget)
    assert plan("max", context=8).kv_cache * 4 == plan("max", context=1000).kv_cache  # the model has 32


@pytest.mark.parametrize("device_bytes", [1, "1%"])
def test_a_budget_below_the_rest_of_the_model_is_refused_with_its_parts(device_bytes):
    small = dataclasses.replace(DEMO, device_bytes=2000)
    needed = plan("max").needed
    pattern = rf"device_bytes: \d+ bytes are less than the {needed} .*predictors 77, attention 1000, KV cache"
    with pytest.raises(ValueError, match=pattern):
        plan(device_bytes, hardware=small)


@pytest.mark.parametrize("device_bytes", ["much", "-1", -1, "8 GB?"])
def test_a_budget_without_sense_is_refused(device_bytes):
    with pytest.raises(ValueError, match="placement.device_bytes: expected"):
        plan(device_bytes)


@pytest.mark.parametrize(
    ("device_bytes", "cold"), [("40%", FFN - int(FFN * 0.4)), ("0", FFN + plan("max").needed)]
)
def test_a_host_too_small_for_the_rest_is_refused(device_bytes, cold):
    assert plan(device_bytes, hardware=dataclasses.replace(DEMO, host_bytes=cold)).ffn == FFN
    small = dataclasses.replace(DEMO, host_bytes=cold - 1)
    with pytest.raises(ValueError, match=rf"host_bytes: {cold - 1} bytes are less than the {cold} that the"):
        plan(device_bytes, hardware=small)


@pytest.mark.parametrize("device_bytes", [0, "40%", "max"])
def test_rows_add_up(device_bytes):
    rows = plan_rows(plan(device_bytes), DEMO)
    for column, memory in ((1, DEMO.device_bytes), (2, DEMO.host_bytes)):
        sizes = [row[column] for row in rows]
        assert sum(sizes[:-2]) == sizes[-2] == memory - sizes[-1]
    assert sum(row[1] + row[2] for row in rows[:-2]) == plan("max").needed + FFN
