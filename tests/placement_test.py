"""What a placement is, and what it must be for odd budgets, widths, statistics and machines."""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pjax.base import ActivationStats, HardwareSpec
from pjax.model_config import ModelConfig, Rope
from pjax.placement import min_hot_neurons, neuron_bytes, solve_placement
from pjax.weights import Ffn

NUM_TOKENS = 1000


def make_config(neurons, *, model=64, gated=True, mlp_bias=False) -> ModelConfig:
    return ModelConfig(
        name="tiny", family="llama", vocab=128, model=model, neurons=tuple(neurons), heads=4, kv_heads=4,
        head_dim=16, context=64, activation="relu", gated=gated, norm="rms", norm_eps=1e-5,
        rope=Rope(1e4, 16), mlp_bias=mlp_bias, tied=False, bos_id=None, eos_ids=(),
    )  # fmt: skip


def make_hardware(config: ModelConfig, minimum: int, dtype="bfloat16") -> HardwareSpec:
    """A machine on which exactly `minimum` hot neurons pay for a join."""
    saved_s = neuron_bytes(config, dtype) * (1 / 30e9 - 1 / 300e9)
    return HardwareSpec(
        name="test", source="simulated", device_bytes=2**50, host_bytes=2**50, device_bytes_per_s=300e9,
        host_bytes_per_s=30e9, host_gather_bytes_per_s=30e9, launch_s=0.0, sync_s=saved_s * (minimum - 0.5),
    )  # fmt: skip


def make_stats(counts) -> ActivationStats:
    return ActivationStats(tuple(np.asarray(c, np.int64) for c in counts), NUM_TOKENS)


def random_counts(rng, neurons):
    return [np.minimum(rng.zipf(1.3, size=n), NUM_TOKENS) for n in neurons]


def solve(counts, num_neurons, *, minimum=1, **kwargs):
    """Places within the bytes of `num_neurons` neurons."""
    config = make_config([len(c) for c in counts])
    size = neuron_bytes(config, "bfloat16")
    hardware = make_hardware(config, minimum)
    return solve_placement(
        make_stats(counts),
        config,
        hardware,
        device_bytes=num_neurons * size,
        **({"dtype": "bfloat16", "objective": "impact"} | kwargs),
    )


def check_constraints(result, counts, minimum):
    size = neuron_bytes(make_config([1]), "bfloat16")
    num_hot = [int(m.sum()) for m in result.hot_mask]
    assert result.device_bytes == size * sum(num_hot) <= result.budget_bytes
    assert [m.shape for m in result.hot_mask] == [(len(c),) for c in counts]
    if sum(num_hot) < sum(len(c) for c in counts):
        assert all(n == 0 or n >= minimum for n in num_hot)
    hot_counts = sum(int(np.asarray(c)[m].sum()) for c, m in zip(counts, result.hot_mask, strict=True))
    assert result.objective == pytest.approx(hot_counts / NUM_TOKENS, rel=1e-12, abs=1e-12)
    assert result.bound >= result.objective


def test_masks_follow_the_number_of_the_layer():
    # Twelve layers: "layer 10" sorts before "layer 2" as text.
    counts = [np.roll(np.r_[np.full(4, 900 + layer), np.full(20, 1)], 2 * layer) for layer in range(12)]
    result = solve(counts, 12 * 4, group_size=4)
    for layer, mask in enumerate(result.hot_mask):
        np.testing.assert_array_equal(mask, counts[layer] == 900 + layer)


@pytest.mark.parametrize("config", [
    make_config([67, 67]), make_config([67, 67], gated=False), make_config([67, 67], mlp_bias=True),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float16", "q8_0"])
def test_budgets_around_a_neuron(config, dtype):
    stats = make_stats(random_counts(np.random.default_rng(1), config.neurons))
    hardware = make_hardware(config, 1, dtype)
    size = neuron_bytes(config, dtype)
    for num_neurons in (1, 40, 133):
        for extra, expected in ((-1, num_neurons - 1), (0, num_neurons), (1, num_neurons)):
            result = solve_placement(
                stats,
                config,
                hardware,
                device_bytes=num_neurons * size + extra,
                dtype=dtype,
                objective="impact",
                group_size=1,
            )
            assert sum(m.sum() for m in result.hot_mask) == expected
            assert result.device_bytes == expected * size


@pytest.mark.parametrize(("model", "neurons"), [(4096, 11008), (8192, 28672), (4096, 14336), (8192, 32768)])
@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0"])
def test_published_shapes_fill_their_budget(model, neurons, dtype):
    config = make_config([neurons] * 3, model=model)
    rng = np.random.default_rng(0)
    stats = make_stats([rng.integers(0, NUM_TOKENS, neurons) for _ in range(3)])
    size = neuron_bytes(config, dtype)
    budget = neurons * size + 1  # of three layers'
    result = solve_placement(
        stats, config, make_hardware(config, 1, dtype), device_bytes=budget, dtype=dtype, objective="impact"
    )
    assert result.status == "optimal" and result.gap < 1e-9
    assert 0 <= budget - result.device_bytes < size
    assert set(result.limits) == {"budget"}
    # The device has the most frequent neurons of all layers together.
    coldest = min(c[m].min() for c, m in zip(stats.counts, result.hot_mask, strict=True))
    assert coldest >= max(c[~m].max() for c, m in zip(stats.counts, result.hot_mask, strict=True))


def test_limits_name_what_keeps_the_next_neuron_cold():
    counts = [np.full(64, 900), np.full(64, 5), np.full(16, 5)]
    assert solve(counts, 70, minimum=20).limits == ("all hot", "minimum", "minimum")
    assert solve(counts, 84, minimum=20).limits == ("all hot", "budget", "minimum")
    assert solve(counts, 144, minimum=20).limits == ("all hot",) * 3
    # What fits beside the hottest layer, which is the narrowest, is spared its join.
    latency = solve(counts, 80, minimum=20, objective="latency")
    assert latency.limits == ("all hot", "budget", "all hot")
    assert latency.next_gib > 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("mlp_bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_neuron_bytes_are_those_of_the_arrays(gated, mlp_bias, dtype):
    rows, bias = jnp.zeros((5, 48), dtype), jnp.zeros(5) if mlp_bias else None
    ffn = Ffn(rows if gated else None, rows, rows, bias if gated else None, bias)
    config = make_config([5], model=48, gated=gated, mlp_bias=mlp_bias)
    assert neuron_bytes(config, jnp.dtype(dtype).name) == ffn.neuron_bytes + 4


def test_quantised_neuron_bytes_count_whole_blocks():
    assert neuron_bytes(make_config([5], model=64), "q8_0") == 3 * 2 * 34 + 4
    assert neuron_bytes(make_config([5], model=65), "q4_0") == 3 * 3 * 18 + 4
    with pytest.raises(ValueError, match=r"dtype: expected one of float32, .* got 'int3'"):
        neuron_bytes(make_config([5]), "int3")


def test_minimum_is_where_the_join_pays():
    config = make_config([5], model=4096)
    hardware = dataclasses.replace(make_hardware(config, 1), sync_s=50e-6)
    size = neuron_bytes(config, "bfloat16")
    minimum = min_hot_neurons(size, hardware)

    def device_pays(num_neurons):
        device_s = num_neurons * size / 300e9 + 50e-6
        return device_s <= num_neurons * size / 30e9

    assert minimum is not None and device_pays(minimum) and not device_pays(minimum - 1)
    assert min_hot_neurons(size, dataclasses.replace(hardware, sync_s=0.0)) == 1
    assert min_hot_neurons(size, dataclasses.replace(hardware, device_bytes_per_s=30e9)) is None


@pytest.mark.parametrize("width", [1, 67, 257])
def test_whole_model_fits(width):
    counts = random_counts(np.random.default_rng(2), [width] * 3)
    result = solve(counts, 3 * width, minimum=10_000)
    assert all(m.all() for m in result.hot_mask)
    assert result.status == "optimal"
    assert result.objective == pytest.approx(sum(c.sum() for c in counts) / NUM_TOKENS)
    assert result.bound == pytest.approx(result.objective)


def test_no_budget_and_no_faster_device_leave_all_cold():
    counts = random_counts(np.random.default_rng(3), [64, 64])
    config = make_config([64, 64])
    slow = dataclasses.replace(make_hardware(config, 1), device_bytes_per_s=30e9)
    for result in (
        solve(counts, 0),
        solve_placement(
            make_stats(counts), config, slow, device_bytes=2**40, dtype="bfloat16", objective="impact"
        ),
    ):
        assert not any(m.any() for m in result.hot_mask)
        assert (result.status, result.objective, result.bound) == ("optimal", 0.0, 0.0)
        assert result.device_bytes == 0
    result = solve_placement(make_stats(counts), config, slow, device_bytes=2**40, dtype="bfloat16")
    assert not any(m.any() for m in result.hot_mask) and set(result.limits) == {"no gain"}


@pytest.mark.parametrize(("minimum", "expected"), [(64, [0, 64, 0]), (65, [0, 0, 0])])
def test_a_large_minimum_makes_layers_all_or_nothing(minimum, expected):
    counts = [np.full(64, 5), np.full(64, 6), np.full(64, 4)]
    result = solve(counts, 127, minimum=minimum, group_size=8)
    assert [m.sum() for m in result.hot_mask] == expected


@pytest.mark.parametrize("group_size", [1, 64, 10**6])
@pytest.mark.parametrize("formulation", ["block", "literal"])
def test_layers_whose_minimum_does_not_fit_are_proven_cold(group_size, formulation):
    counts = random_counts(np.random.default_rng(5), [1000, 64, 17, 1])
    result = solve(counts, 325, minimum=362, group_size=group_size, formulation=formulation)
    assert not any(m.any() for m in result.hot_mask)
    assert (result.status, result.objective, result.bound, result.gap) == ("optimal", 0.0, 0.0, 0.0)


def test_the_literal_form_with_a_layer_that_cannot_open():
    counts = [np.full(64, 900), np.full(16, 5)]  # the second is narrower than its minimum
    result = solve(counts, 70, minimum=20, formulation="literal", group_size=8)
    assert [int(m.sum()) for m in result.hot_mask] == [64, 0]


def test_dead_and_equal_layers():
    dead = solve([np.zeros(20), np.full(20, 9)], 20, group_size=5)
    assert not dead.hot_mask[0].any() and dead.hot_mask[1].all()
    equal = solve([np.full(20, 9)] * 3, 30, group_size=5)
    assert equal.objective == pytest.approx(30 * 9 / NUM_TOKENS)
    assert equal.status == "optimal"


def test_hottest_layer_comes_first():
    counts = [np.full(67, 10), np.full(67, 10), np.full(67, NUM_TOKENS)]
    result = solve(counts, 67 + 64)
    assert result.hot_mask[2].all() and sum(m.sum() for m in result.hot_mask) == 67 + 64


def test_same_input_same_placement():
    counts = random_counts(np.random.default_rng(4), [300] * 4)
    first, second = (solve(counts, 500, minimum=70, group_size=16) for _ in range(2))
    for a, b in zip(first.hot_mask, second.hot_mask, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("fault", [ImportError, NameError, OSError])
def test_without_a_solver_there_is_a_hint_and_a_placement(monkeypatch, fault):
    mip = pytest.importorskip("mip")

    def fail(*args, **kwargs):
        raise fault("libCbc.so")

    if fault is ImportError:
        monkeypatch.setitem(sys.modules, "mip", None)
    else:
        monkeypatch.setattr(mip, "Model", fail)
    counts = random_counts(np.random.default_rng(6), [64, 64, 64])
    with pytest.warns(UserWarning, match="python-mip cannot be used .* pip install mip"):
        result = solve(counts, 70, minimum=40, group_size=4)
    check_constraints(result, counts, 40)
    assert result.status == "greedy" and 0 < result.objective < result.bound


def test_the_solver_is_silent(capfd):
    counts = random_counts(np.random.default_rng(7), [300] * 4)
    solve(counts, 500, minimum=220, group_size=16)
    assert capfd.readouterr() == ("", "")
