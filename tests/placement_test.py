"""The placement against brute force and another solver, and its constraints in integers."""

import dataclasses
import itertools
import math
import sys

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
from hypothesis import strategies as st

from pjax import placement
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
        **({"dtype": "bfloat16"} | kwargs),
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


def brute_force(counts, num_neurons, minimum, group_size, needs_leading_groups) -> float:
    """The best objective over all sets of groups of every layer."""
    if sum(len(c) for c in counts) <= num_neurons:
        return sum(int(np.sum(c)) for c in counts) / NUM_TOKENS
    states = np.zeros((1, 2), np.int64)  # neurons, counts
    for layer_counts in counts:
        ranked = np.sort(layer_counts)[::-1]
        groups = [ranked[i : i + group_size] for i in range(0, len(ranked), group_size)]
        num_leading = min(len(groups), max(1, math.ceil(minimum / group_size)))
        options = [(0, 0)]
        for chosen in itertools.product([False, True], repeat=len(groups)):
            neurons = sum(len(g) for g, c in zip(groups, chosen, strict=True) if c)
            if neurons >= max(minimum, 1) and (all(chosen[:num_leading]) or not needs_leading_groups):
                options.append((neurons, sum(int(g.sum()) for g, c in zip(groups, chosen, strict=True) if c)))
        states = np.concatenate([states + np.asarray(option) for option in options])
        states = states[states[:, 0] <= num_neurons]
    return states[:, 1].max() / NUM_TOKENS


@st.composite
def instances(draw, whole_groups: bool):
    group_size = draw(st.integers(1, 4))
    num_groups = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    widths = [n * group_size for n in num_groups]
    if not whole_groups:
        widths = [w - draw(st.integers(0, group_size - 1)) for w in widths]
    count = st.integers(0, NUM_TOKENS) | st.sampled_from([0, 7])
    counts = [draw(st.lists(count, min_size=w, max_size=w)) for w in widths]
    num_neurons = draw(st.integers(0, sum(widths)))
    return counts, num_neurons, draw(st.integers(1, 9)), group_size


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(instances(whole_groups=True))
def test_equals_brute_force_over_the_program_of_the_paper(instance):
    counts, num_neurons, minimum, group_size = instance
    result = solve(counts, num_neurons, minimum=minimum, group_size=group_size)
    check_constraints(result, counts, minimum)
    best = brute_force(counts, num_neurons, minimum, group_size, needs_leading_groups=False)
    assert result.status == "optimal"
    assert result.objective == pytest.approx(best, rel=2e-6, abs=1e-9)
    assert result.bound >= best - 1e-9


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(instances(whole_groups=False))
def test_equals_brute_force_where_groups_do_not_divide_the_width(instance):
    counts, num_neurons, minimum, group_size = instance
    result = solve(counts, num_neurons, minimum=minimum, group_size=group_size)
    check_constraints(result, counts, minimum)
    best = brute_force(counts, num_neurons, minimum, group_size, needs_leading_groups=True)
    assert result.status == "optimal"
    assert result.objective == pytest.approx(best, rel=2e-6, abs=1e-9)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(instances(whole_groups=False))
def test_greedy_is_feasible_and_its_bound_holds(instance):
    counts, num_neurons, minimum, group_size = instance
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "_choose_optimally", lambda *args: None)
        result = solve(counts, num_neurons, minimum=minimum, group_size=group_size)
    check_constraints(result, counts, minimum)
    best = brute_force(counts, num_neurons, minimum, group_size, needs_leading_groups=True)
    assert result.objective <= best + 1e-9
    assert result.bound >= best - 1e-9
    assert result.status == "greedy" or result.objective == pytest.approx(best)


def solve_literally(counts, num_neurons, minimum, group_size):
    """The paper's equations 6 to 8 as they stand, by HiGHS."""
    num_layers, num_groups = len(counts), len(counts[0]) // group_size
    values = [np.sort(c)[::-1].reshape(num_groups, group_size).sum(axis=1) for c in counts]
    is_hot = scipy.sparse.kron(scipy.sparse.eye(num_layers), np.full((1, num_groups), group_size))
    opened = scipy.sparse.eye(num_layers)
    large = num_groups * group_size
    rows = scipy.sparse.vstack([
        scipy.sparse.csr_array(np.repeat([[group_size, 0]], [num_layers * num_groups, num_layers], axis=1)),
        scipy.sparse.hstack([-is_hot, minimum * opened]),
        scipy.sparse.hstack([is_hot, -large * opened]),
    ])  # fmt: skip
    objective = np.concatenate([-np.concatenate(values) / NUM_TOKENS, np.zeros(num_layers)])
    solution = scipy.optimize.milp(
        objective,
        integrality=np.ones_like(objective),
        bounds=scipy.optimize.Bounds(0, 1),
        constraints=scipy.optimize.LinearConstraint(
            rows.tocsc(), ub=np.concatenate([[num_neurons], np.zeros(2 * num_layers)])
        ),
        options={"mip_rel_gap": 1e-6},
    )
    assert solution.status == 0
    return -solution.fun


def solve_by_table(counts, num_neurons, minimum, group_size):
    """The best prefix of every layer's sorted groups, by dynamic programming over the budget."""
    best = np.zeros(num_neurons // group_size + 1)
    for layer_counts in counts:
        values = np.sort(layer_counts)[::-1].reshape(-1, group_size).sum(axis=1).cumsum() / NUM_TOKENS
        with_layer = best.copy()
        for num_groups in range(max(1, math.ceil(minimum / group_size)), min(len(values), len(best) - 1) + 1):
            shifted = best[: len(best) - num_groups] + values[num_groups - 1]
            with_layer[num_groups:] = np.maximum(with_layer[num_groups:], shifted)
        best = with_layer
    return best[-1]


def counts_of_llama_7b_size():
    rng = np.random.default_rng(0)
    decay = rng.uniform(0.4, 1.2, size=(32, 1))
    frequency = np.minimum(1.0, (np.arange(1, 11009) / 200.0) ** -decay) * rng.uniform(0.3, 1, (32, 1))
    return [rng.permutation(c) for c in (frequency * NUM_TOKENS).astype(np.int64)]


def test_equals_another_solver_at_the_size_of_llama_7b():
    counts, num_neurons, minimum = counts_of_llama_7b_size(), int(0.3 * 32 * 11008), 256
    result = solve(counts, num_neurons, minimum=minimum)
    check_constraints(result, counts, minimum)
    assert result.status == "optimal"
    assert result.objective == pytest.approx(solve_literally(counts, num_neurons, minimum, 64), rel=3e-6)


@pytest.mark.parametrize(("minimum", "share"), [(256, 0.3), (2560, 0.1), (3000, 0.3)])
def test_equals_a_table_at_the_size_of_llama_7b(minimum, share):
    counts, num_neurons = counts_of_llama_7b_size(), int(share * 32 * 11008)
    result = solve(counts, num_neurons, minimum=minimum)
    check_constraints(result, counts, minimum)
    assert result.status == "optimal"
    assert result.objective == pytest.approx(solve_by_table(counts, num_neurons, minimum, 64), rel=2e-6)


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
                stats, config, hardware, device_bytes=num_neurons * size + extra, dtype=dtype, group_size=1
            )
            assert sum(m.sum() for m in result.hot_mask) == expected
            assert result.device_bytes == expected * size


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
        solve_placement(make_stats(counts), config, slow, device_bytes=2**40, dtype="bfloat16"),
    ):
        assert not any(m.any() for m in result.hot_mask)
        assert (result.status, result.objective, result.bound) == ("optimal", 0.0, 0.0)
        assert result.device_bytes == 0


@pytest.mark.parametrize(("minimum", "expected"), [(64, [0, 64, 0]), (65, [0, 0, 0])])
def test_a_large_minimum_makes_layers_all_or_nothing(minimum, expected):
    counts = [np.full(64, 5), np.full(64, 6), np.full(64, 4)]
    result = solve(counts, 127, minimum=minimum, group_size=8)
    assert [m.sum() for m in result.hot_mask] == expected


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


def test_without_time_the_answer_is_still_valid():
    counts = random_counts(np.random.default_rng(5), [2048] * 32)
    result = solve(counts, 20_000, minimum=500, group_size=16, time_limit_s=0.001)
    check_constraints(result, counts, 500)
    assert result.status in ("greedy", "feasible")
    assert 0 < result.objective <= result.bound


@pytest.mark.parametrize("fault", [ImportError, NameError, OSError])
def test_without_a_solver_there_is_a_hint_and_a_placement(monkeypatch, fault):
    mip = pytest.importorskip("mip")

    def fail(*args, **kwargs):
        raise fault("libCbc.so")

    if fault is ImportError:
        monkeypatch.setitem(sys.modules, "mip", None)
    else:
        monkeypatch.setattr(mip, "Model", fail)
    counts = random_counts(np.random.default_rng(6), [64, 64])
    with pytest.warns(UserWarning, match="python-mip cannot be used .* pip install mip"):
        result = solve(counts, 70, minimum=3, group_size=4)
    check_constraints(result, counts, 3)
    assert result.status == "greedy" and result.objective > 0


def test_the_solver_is_silent(capfd):
    counts = random_counts(np.random.default_rng(7), [300] * 4)
    solve(counts, 500, minimum=70, group_size=16)
    solve(counts, 500, minimum=70, group_size=16, time_limit_s=0.001)
    assert capfd.readouterr() == ("", "")
