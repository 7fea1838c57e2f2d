"""The parts of the report against numpy, and the table for a sparse and for a dense-only model."""

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console

from pjax import report
from pjax.base import ActivationStats, HardwareSpec, Placement
from tests.tiny_model import tiny_config, tiny_decoder, tiny_predictors

STATS = ActivationStats((np.array([8, 1, 1, 0]), np.array([5, 5, 0, 0, 0, 10])), 10)
MASKS = (np.array([True, False, False, True]), np.array([False, True, False, False, False, True]))
PLACEMENT = Placement(MASKS, "optimal", 2.3, 2.5, 4096, 8192, 0.25)
HARDWARE = HardwareSpec("demo", "simulated", 1, 1, 1.0, 1.0, 1.0, 0.0, 0.0)


def test_model_part_by_hand():
    attention = 16 * 16 + 2 * 8 * 16 + 16 * 16
    weights = 50 * 16 * 2 + 2 * (attention + 2 * 16) + 3 * 16 * (24 + 40) + 16
    assert report.model_part(tiny_decoder()) == {
        "name": "tiny", "family": "llama", "layers": 2, "neurons": [24, 40], "parameters": weights,
        "bytes": 4 * weights,
    }  # fmt: skip


def test_profile_part_by_hand():
    assert report.profile_part(STATS, "measured") == {
        "source": "measured",
        "tokens": 10,
        "density_mean": pytest.approx((10 / 40 + 20 / 60) / 2),
        "density_per_layer": [pytest.approx(10 / 40), pytest.approx(20 / 60)],
        "hot_share_80": 4 / 10,  # 10 + 8 + 5 + 5 of 30
        "hot_share_80_per_layer": [1 / 4, 3 / 6],
    }


def test_profile_part_without_a_number_of_tokens():
    """What cannot be known is null; the shape of the distribution can."""
    known = report.profile_part(STATS, "measured")
    unknown = report.profile_part(dataclasses.replace(STATS, num_tokens_known=False), "somewhere")
    assert unknown == known | {
        "source": "somewhere", "tokens": None, "density_mean": None, "density_per_layer": None
    }  # fmt: skip


def test_predictor_part_is_the_mean_over_layers():
    predictors = tiny_predictors(tiny_decoder(), 0.5)
    part = report.predictor_part(predictors, "lowrank", "trained")
    assert part["bytes"] == 100 + 101
    for name in ("recall", "precision", "density"):
        assert part[f"{name}_mean"] == pytest.approx(np.mean([getattr(r, name) for r in predictors.reports]))
    assert list(part["per_layer"][0]) == [
        "rank", "recall", "precision", "density", "true_density", "threshold", "bytes"
    ]  # fmt: skip
    assert (part["source"], part["kind"], part["dtype"]) == ("trained", "lowrank", "float32")
    assert len(part["per_layer"]) == 2


def test_placement_and_hardware_parts():
    assert report.placement_part(PLACEMENT, "solved") == {
        "source": "solved", "status": "optimal", "objective": 2.3, "bound": 2.5, "hot_neurons": [2, 2],
        "device_bytes": 4096, "budget_bytes": 8192, "solve_s": 0.25,
    }  # fmt: skip
    assert report.hardware_part(HARDWARE) == {"name": "demo", "source": "simulated"}


def test_neuron_load_share():
    assert report.neuron_load_share(STATS, PLACEMENT) == (8 + 0 + 5 + 10) / 30
    nothing = ActivationStats(tuple(np.zeros_like(c) for c in STATS.counts), 10)
    assert report.neuron_load_share(nothing, PLACEMENT) == 0.0


def sparse_report() -> dict:
    model = tiny_decoder()
    return {
        "model": report.model_part(model),
        "profile": report.profile_part(STATS, "measured"),
        "predictor": report.predictor_part(tiny_predictors(model, 0.5), "lowrank", "trained"),
        "hardware": report.hardware_part(HARDWARE),
        "placement": report.placement_part(PLACEMENT, "solved"),
        "executor": {"neuron_load_share": 23 / 30},
        "quality": {
            "perplexity_dense": 12.3456,
            "perplexity_exact": 12.3457,
            "perplexity_predicted": 12.5,
            "guard": "passed",
        },
        "speed": {"dense_tokens_per_s": 1000.4, "exact_tokens_per_s": 2345.6, "predicted_tokens_per_s": 3000},
    }


def dense_report() -> dict:
    return sparse_report() | {
        "profile": None,
        "predictor": None,
        "placement": None,
        "executor": {"neuron_load_share": None},
        "quality": {
            "perplexity_dense": 12.3456,
            "perplexity_exact": None,
            "perplexity_predicted": None,
            "guard": None,
        },
        "speed": {"dense_tokens_per_s": 1000.4, "exact_tokens_per_s": None, "predicted_tokens_per_s": None},
    }


def rendered(values: dict) -> list[list[str]]:
    """The table's lines, each split at its gaps."""
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report.summary_table(values))
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in console.export_text().splitlines()
    ]


def test_report_is_strict_json():
    for values in (sparse_report(), dense_report()):
        assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_table_of_a_sparse_model():
    lines = rendered(sparse_report())
    assert ["perplexity", "12.346", "12.346", "12.500"] in lines
    assert ["tokens/s", "1,000", "2,346", "3,000"] in lines
    assert ["neurons used", "100.0%", "29.2%", "20.0%"] in lines
    assert ["recall", "-", "-", "90.0%"] in lines
    text = " ".join(cell for line in lines for cell in line)
    assert "tiny, 2 layers" in text
    assert "placement optimal: 4 of 64 neurons hot" in text
    assert "76.7%" in text
    assert "simulated hardware" in text
    assert "guard passed" in text


def test_table_of_a_model_without_zeros():
    lines = rendered(dense_report())
    assert ["perplexity", "12.346", "-", "-"] in lines
    assert ["tokens/s", "1,000", "-", "-"] in lines
    text = " ".join(cell for line in lines for cell in line)
    assert "neurons used" not in text
    assert "None" not in text
    assert tiny_config(activation="silu").is_sparse is False
