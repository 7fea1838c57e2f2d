"""Statistics, settings, hardware and answers that make no sense are refused by name."""

import dataclasses

import numpy as np
import pytest

from pjax.base import ActivationStats
from pjax.placement import neuron_bytes, place, solve_placement
from pjax.placement.solver import Choice
from tests.placement_test import make_config, make_hardware, make_stats, solve


@pytest.mark.parametrize(("counts", "num_tokens", "message"), [
    ([], 10, "expected counts over at least one token, got 0 layers"),
    ([[1.0], [1.0]], 0, "num_tokens 0; run collect_stats on model 'tiny'"),
    ([[1.0]], 10, "1 layers of counts, but config 'tiny' has 2 layers"),
    ([[1.0], [1.0, 2.0]], 10, r"layer 1 has counts of shape \(2,\), but config 'tiny' has 1 neurons"),
    ([[1.0], [-1.0]], 10, "layer 1 has counts outside 0 to num_tokens 10"),
    ([[11.0], [1.0]], 10, "layer 0 has counts outside"),
    ([[float("nan")], [1.0]], 10, "layer 0 has counts outside"),
])  # fmt: skip
def test_statistics_of_something_else_are_refused(counts, num_tokens, message):
    config = make_config([1, 1])
    stats = ActivationStats(tuple(np.array(c) for c in counts), num_tokens)
    with pytest.raises(ValueError, match=message):
        solve_placement(stats, config, make_hardware(config, 1), device_bytes=10, dtype="bfloat16")


@pytest.mark.parametrize(("changes", "message"), [
    ({"device_bytes": -1}, "device_bytes: expected whole bytes from 0 to the .*, got -1"),
    ({"device_bytes": 2**60}, "device_bytes: expected whole bytes from 0 to the .* 'test'"),
    ({"device_bytes": 10, "group_size": 0}, "group_size: expected a whole number >= 1, got 0"),
    ({"device_bytes": 10, "group_size": 2.0}, "group_size: expected a whole number >= 1, got 2.0"),
    ({"device_bytes": 10, "group_size": float("inf")}, "group_size: expected a whole number >= 1, got inf"),
    ({"device_bytes": 10, "time_limit_s": 0}, "time_limit_s: expected .* got 0"),
])  # fmt: skip
def test_settings_without_sense_are_refused(changes, message):
    config = make_config([4])
    with pytest.raises(ValueError, match=message):
        solve_placement(
            make_stats([[1] * 4]), config, make_hardware(config, 1), **({"dtype": "bfloat16"} | changes)
        )


@pytest.mark.parametrize(("field", "value"), [
    ("device_bytes", 0), ("host_bytes", -1), ("device_bytes_per_s", 0.0), ("sync_s", -1e-6),
    ("host_gather_bytes_per_s", float("nan")), ("host_bytes_per_s", float("inf")),
])  # fmt: skip
def test_hardware_without_sense_is_refused(field, value):
    config = make_config([4])
    hardware = dataclasses.replace(make_hardware(config, 1), **{field: value})
    with pytest.raises(ValueError, match=f"hardware 'test': {field}: expected .* number.*measure_hardware"):
        solve_placement(make_stats([[1] * 4]), config, hardware, device_bytes=0, dtype="bfloat16")


def test_a_host_too_small_for_the_cold_neurons_is_named():
    config = make_config([64])
    hardware = dataclasses.replace(make_hardware(config, 1), host_bytes=100)
    with pytest.raises(ValueError, match="host_bytes: the cold neurons need .* raise device_bytes"):
        solve_placement(make_stats([[1] * 64]), config, hardware, device_bytes=0, dtype="bfloat16")


def test_a_wrong_answer_of_the_solver_is_not_used(monkeypatch):
    def lie(*args, **kwargs):
        return Choice(("open", "open"), num_hot, 1.0, 1e9, "optimal")

    monkeypatch.setattr(place, "choose", lie)
    num_hot = (16, 16)
    with pytest.raises(RuntimeError, match="bytes of"):
        solve([np.full(16, 5)] * 2, 20, group_size=4)
    num_hot = (4, 0)
    with pytest.raises(RuntimeError, match="layer 0 4 hot neurons, fewer than the 8"):
        solve([np.full(16, 5)] * 2, 20, minimum=8, group_size=4)


@pytest.mark.parametrize("choice", [
    {"objective": "speed"}, {"minimum": "none"}, {"formulation": "short"}, {"formulation": "literal"},
])  # fmt: skip
def test_choices_without_sense_are_refused(choice):
    config = make_config([4])
    stats, hardware = make_stats([[1] * 4]), make_hardware(config, 1)
    with pytest.raises(ValueError, match=f"{next(iter(choice))}: "):
        solve_placement(stats, config, hardware, device_bytes=10, dtype="bfloat16", **choice)


def test_types_of_another_number_of_layers_are_refused():
    with pytest.raises(ValueError, match="dtype: expected one type, or one for each of 2 layers, got 3"):
        solve([np.full(16, 5)] * 2, 20, dtype=["q4_0"] * 3)


@pytest.mark.parametrize("objective", ["impact", "latency"])
@pytest.mark.parametrize("minimum", [1, 10, 40])
def test_what_the_host_cannot_hold_is_moved_to_the_device(objective, minimum):
    config = make_config([32, 32])
    size = neuron_bytes(config, "bfloat16")
    hardware = dataclasses.replace(make_hardware(config, minimum), host_bytes=30 * size)
    stats = make_stats([np.arange(32), np.arange(32)])
    result = solve_placement(
        stats, config, hardware, device_bytes=34 * size, dtype="bfloat16", objective=objective
    )
    assert sum(int((~m).sum()) for m in result.hot_mask) == 30
    assert result.device_bytes == 34 * size
    with pytest.raises(ValueError, match=f"need {31 * size} bytes, the host has {30 * size}"):
        solve_placement(
            stats, config, hardware, device_bytes=33 * size, dtype="bfloat16", objective=objective
        )
