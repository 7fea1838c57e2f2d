"""The parts of the report against numpy, and the tables of a sparse and of a dense-only model."""

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from pjax.base import ActivationStats, HardwareSpec, Placement
from pjax.placement import explain_placement
from pjax.plan import MemoryPlan
from pjax.quality import Quality, WayQuality
from pjax.report import record, tables
from pjax.settings import QualitySettings
from tests.tiny_model import tiny_config, tiny_decoder, tiny_predictors

STATS = ActivationStats((np.array([8, 1, 1, 0]), np.array([5, 5, 0, 0, 0, 10])), 10)
MASKS = (np.array([True, False, False, True]), np.array([False, True, False, False, False, True]))
PLACEMENT = Placement(
    MASKS, "optimal", 2.3, 2.5, 4096, 8192, 0.25, "impact", ("budget", "minimum"), next_gib=0.7
)
HARDWARE = HardwareSpec("demo", "simulated", 1, 1, 1.0, 1.0, 1.0, 0.0, 0.5)
MEMORY = MemoryPlan(1, 2, 3, 4, 5, 6, 7, 22, 32)


def test_model_part_by_hand():
    attention = 16 * 16 + 2 * 8 * 16 + 16 * 16
    weights = 50 * 16 * 2 + 2 * (attention + 2 * 16) + 3 * 16 * (24 + 40) + 16
    assert record.model_part(tiny_decoder()) == {
        "name": "tiny", "family": "llama", "layers": 2, "neurons": [24, 40], "parameters": weights,
        "bytes": 4 * weights,
    }  # fmt: skip


def test_profile_part_by_hand():
    assert record.profile_part(STATS, "measured") == {
        "source": "measured",
        "tokens": 10,
        "density_mean": pytest.approx((10 / 40 + 20 / 60) / 2),
        "density_per_layer": [pytest.approx(10 / 40), pytest.approx(20 / 60)],
        "hot_share_80": 4 / 10,  # 10 + 8 + 5 + 5 of 30
        "hot_share_80_per_layer": [1 / 4, 3 / 6],
    }


def test_profile_part_without_a_number_of_tokens():
    """What cannot be known is null; the shape of the distribution can."""
    known = record.profile_part(STATS, "measured")
    unknown = record.profile_part(dataclasses.replace(STATS, num_tokens_known=False), "somewhere")
    assert unknown == known | {
        "source": "somewhere", "tokens": None, "density_mean": None, "density_per_layer": None
    }  # fmt: skip


def test_predictor_part_is_the_mean_over_layers():
    predictors = tiny_predictors(tiny_decoder(), 0.5)
    part = record.predictor_part(predictors, "lowrank", "trained")
    assert part["bytes"] == 100 + 101
    for name in ("recall", "precision", "density"):
        assert part[f"{name}_mean"] == pytest.approx(np.mean([getattr(r, name) for r in predictors.reports]))
    assert list(part["per_layer"][0]) == [
        "rank", "recall", "precision", "density", "true_density", "threshold", "bytes",
        "contribution_recall", "kind",
    ]  # fmt: skip
    assert (part["source"], part["kind"], part["dtype"]) == ("trained", "lowrank", "float32")
    assert len(part["per_layer"]) == 2


def placement_part(**changes) -> dict:
    config = tiny_config(neurons=(4, 6))
    explained = explain_placement(PLACEMENT, STATS, config, HARDWARE, dtype="float32")
    return record.placement_part(PLACEMENT, "solved", explained, MEMORY) | changes


def test_placement_and_hardware_parts():
    size = 3 * 16 * 4 + 4
    times = {"device_s": 0.8 * size, "host_s": 0.2 * size, "join_s": 0.5}
    layer = {"hot": 2, "neurons": 4, "share": 0.8, "limit": "budget"} | times
    part = placement_part()
    assert part.pop("per_layer")[0] == pytest.approx(layer)
    assert part.pop("step_s") == pytest.approx((0.8 + 1.5) * size + 2 * 0.5)
    assert part.pop("all_cold_s") == pytest.approx((1.0 + 2.0) * size + 2 * 0.5)
    assert part == {
        "source": "solved", "status": "optimal", "objective": 2.3, "bound": 2.5, "hot_neurons": [2, 2],
        "device_bytes": 4096, "budget_bytes": 8192, "solve_s": 0.25, "goal": "impact",
        "gap": pytest.approx(0.2 / 2.5), "next_gib": 0.7, "memory": MEMORY._asdict(),
    }  # fmt: skip
    assert record.hardware_part(HARDWARE) == {"name": "demo", "source": "simulated"}


def test_neuron_load_share():
    assert record.neuron_load_share(STATS, PLACEMENT) == (8 + 0 + 5 + 10) / 30
    nothing = ActivationStats(tuple(np.zeros_like(c) for c in STATS.counts), 10)
    assert record.neuron_load_share(nothing, PLACEMENT) == 0.0


def sparse_report() -> dict:
    model = tiny_decoder()
    return {
        "model": record.model_part(model),
        "profile": record.profile_part(STATS, "measured"),
        "predictor": record.predictor_part(tiny_predictors(model, 0.5), "lowrank", "trained"),
        "hardware": record.hardware_part(HARDWARE),
        "placement": placement_part(),
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


def text_of(table) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def rendered(values: dict) -> list[list[str]]:
    """The table's lines, each split at its gaps."""
    lines = text_of(tables.summary_table(values)).splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


DENSE = WayQuality(20.0, 0.5, 0.0, 0.0, 0.0, 1.0)
PREDICTED = WayQuality(21.0, 0.5, 0.05, 0.01, 0.125, 0.75)
ERRORS = {"exact": [1e-7, 2e-7], "predicted": [0.25, 0.5]}


def test_quality_part_of_a_model_that_fails_the_guard():
    modes = {"dense": DENSE, "exact": DENSE, "predicted": PREDICTED}
    part = record.quality_part(Quality(modes, 64), ERRORS, QualitySettings())
    faults = part.pop("faults")
    assert part == {
        "perplexity_dense": 20.0, "perplexity_exact": 20.0, "perplexity_predicted": 21.0,
        "top1_agreement": 0.75, "kl_mean": 0.125, "tokens": 64, "guard": "failed", "worst_layers": [1, 0],
        "modes": {
            "dense": DENSE._asdict() | {"layer_error": None},
            "exact": DENSE._asdict() | {"layer_error": [1e-7, 2e-7]},
            "predicted": PREDICTED._asdict() | {"layer_error": [0.25, 0.5]},
        },
    }  # fmt: skip
    warning = tables.guard_warning(part | {"faults": faults})
    assert warning is not None and "5.0% above" in warning and "0.125 nats" in warning
    assert "1 (50.0%), 0 (25.0%)" in warning and "falls back to exact" in warning


def test_quality_part_that_passes_and_of_a_model_without_zeros():
    modes = {"dense": DENSE, "exact": DENSE, "predicted": PREDICTED}
    lenient = QualitySettings(max_perplexity_rise=0.06, max_kl=0.2)
    part = record.quality_part(Quality(modes, 64), ERRORS, lenient)
    assert (part["guard"], part["faults"]) == ("passed", [])
    assert tables.guard_warning(part) is None
    part = record.quality_part(Quality({"dense": DENSE}, 64), {}, QualitySettings())
    assert part["perplexity_dense"] == 20.0
    for name in ("perplexity_exact", "kl_mean", "top1_agreement", "guard", "faults", "worst_layers"):
        assert part[name] is None
    assert tables.guard_warning(part) is None


def test_decode_line():
    decode = {
        "predictor_s": 1.5e-3, "ffn_s": 2.5e-4, "rows_predicted": 1234.4, "rows_computed": 60.0,
        "rows_active": 59.6, "bytes_per_token": 7_250_000,
    }  # fmt: skip
    values = {"model": {"neurons": [4000, 2144]}}
    assert tables.decode_line(values | {"decode": decode}) == (
        "mode predicted, a token: predictors 1.500 ms, FFNs 0.250 ms; of 6,144 rows 1,234 predicted, "
        "60 computed, 60 active; 7.2 MB read"
    )
    assert tables.decode_line(values | {"decode": None}) is None


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


def test_layers_and_plan_are_tables():
    lines = [line.split() for line in text_of(tables.layer_table(placement_part())).splitlines()]
    assert ["0", "2", "4", "80.0%", "156800000.0", "39200000.0", "budget"] in lines
    assert ["1", "2", "6", "75.0%", "294000000.0", "98000000.0", "minimum"] in lines
    plan = [line.split() for line in text_of(tables.plan_table(MEMORY, HARDWARE)).splitlines()]
    assert ["predictors", "0.0", "MiB", "-"] in plan and ["together", "0.0", "MiB", "0.0", "MiB"] in plan
    assert "everything runs on the host" in text_of(tables.plan_table(MEMORY._replace(budget=0), HARDWARE))


def test_table_of_a_model_without_zeros():
    lines = rendered(dense_report())
    assert ["perplexity", "12.346", "-", "-"] in lines
    assert ["tokens/s", "1,000", "-", "-"] in lines
    text = " ".join(cell for line in lines for cell in line)
    assert "neurons used" not in text
    assert "None" not in text
    assert tiny_config(activation="silu").is_sparse is False
