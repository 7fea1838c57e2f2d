"""Records come back from artefacts as they were, and an artefact that lacks something is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax import workdir
from pjax.base import (
    ActivationStats,
    LowRankPredictor,
    Placement,
    PredictorReport,
    Predictors,
    ScoreHistogram,
    SignPredictor,
)
from pjax.predictor import with_dtype
from pjax.thresholds import NUM_BINS, set_recall
from pjax.workdir import Artefact, load, save


def through_file(folder, artefact: Artefact) -> Artefact:
    save(folder, "stage", "x", artefact)
    found = load(folder, "stage", "x")
    assert found is not None
    return found


def test_stats_round_trip(tmp_path):
    stats = ActivationStats(tuple(np.arange(n, dtype=np.int64) * 2**40 for n in (3, 5, *[2] * 10)), 2**41)
    found = workdir.unpack_stats(through_file(tmp_path, workdir.pack_stats(stats)))
    assert found.num_tokens == stats.num_tokens
    assert [c.tolist() for c in found.counts] == [c.tolist() for c in stats.counts]
    assert all(c.dtype == np.int64 for c in found.counts)


@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0"])
def test_predictors_of_other_types_round_trip(tmp_path, dtype):
    rng = np.random.default_rng(0)
    parts = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((32, 64), (5, 32), (5,), ()))
    layer = with_dtype(LowRankPredictor(*parts), dtype)
    artefact = through_file(tmp_path, workdir.pack_predictors(Predictors((layer,) * 2, ())))
    for found in workdir.unpack_predictors(artefact).layers:
        assert jax.tree.structure(found) == jax.tree.structure(layer)
        for array, expected in zip(jax.tree.leaves(found), jax.tree.leaves(layer), strict=True):
            np.testing.assert_array_equal(array, expected)


def test_predictors_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    layers = tuple(
        LowRankPredictor(
            *(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3), (n, 2), (n,), ())), which
        )
        for n, which in ((4, "normed"), (5, "residual"), (6, "normed"))
    )
    reports = tuple(
        PredictorReport(2, 1 / 3, 0.5, 0.25, 0.125, -1e9, 60 + i, 0.75, "lowrank") for i in range(3)
    )
    found = workdir.unpack_predictors(
        through_file(tmp_path, workdir.pack_predictors(Predictors(layers, reports)))
    )
    assert found.reports == reports
    for layer, expected in zip(found.layers, layers, strict=True):
        assert layer.input == expected.input
        for field in ("first", "second", "bias", "threshold"):
            array = getattr(layer, field)
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, np.asarray(getattr(expected, field)))


def test_other_kinds_and_thresholds_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    signs = SignPredictor(
        jnp.asarray(rng.integers(0, 2**32, (5, 2)), jnp.uint32), jnp.float32(0.1), jnp.ones(5), jnp.float32(1)
    )
    histograms = tuple(
        ScoreHistogram(rng.integers(0, 9, (2, NUM_BINS)), rng.random(NUM_BINS)) for _ in range(2)
    )
    kept = Predictors((signs, None), (), histograms)
    found = workdir.unpack_predictors(through_file(tmp_path, workdir.pack_predictors(kept)))
    assert jax.tree.structure(found.layers) == jax.tree.structure(kept.layers)
    assert all(map(np.array_equal, jax.tree.leaves(found.layers), jax.tree.leaves(kept.layers)))
    assert all(map(np.array_equal, jax.tree.leaves(found.histograms), jax.tree.leaves(histograms)))
    chosen = set_recall(kept, 0.7)
    again = workdir.unpack_thresholds(through_file(tmp_path, workdir.pack_thresholds(chosen)), found)
    assert again.reports == chosen.reports and again.layers[1] is None
    assert float(again.layers[0].threshold) == float(chosen.layers[0].threshold)


def test_placement_round_trip(tmp_path):
    masks = (np.array([True, False, True]), np.zeros(4, bool), np.ones(2, bool))
    placement = Placement(
        masks, "feasible", 1 / 3, 0.5, 10, 20, 0.125, "latency", ("budget", "minimum", "all hot")
    )
    found = workdir.unpack_placement(through_file(tmp_path, workdir.pack_placement(placement)), (3, 4, 2))
    assert [m.tolist() for m in found.hot_mask] == [m.tolist() for m in masks]
    assert all(m.dtype == bool for m in found.hot_mask)
    assert found.__dict__ | {"hot_mask": None} == placement.__dict__ | {"hot_mask": None}


@pytest.mark.parametrize("ids", [[0, 0], [-1], [3], [1, 2, 1], [1.5], [True], "ab"])
def test_placement_with_a_senseless_table_is_refused(ids):
    artefact = workdir.pack_placement(Placement((np.ones(3, bool),), "optimal", 0, 0, 0, 0, 0))
    artefact.record["layers"][0]["hot_ids"] = ids
    with pytest.raises(ValueError, match=r"layer 0's neuron table has an id twice or outside 0\.\.2"):
        workdir.unpack_placement(artefact, (3,))


MASK = np.array([True, False, True])
SIGNS = SignPredictor(np.zeros((3, 1), np.uint32), np.float32(0.1), np.ones(3), np.float32(1))
REPORT = PredictorReport(0, 1.0, 0.5, 0.5, 0.25, 1.0, 24, 1.0, "sign")
KEPT = Predictors((SIGNS,), (REPORT,), (ScoreHistogram(np.ones((2, NUM_BINS)), np.ones(NUM_BINS)),))
WHOLE = {
    "profile.npz": (workdir.pack_stats(ActivationStats((MASK.astype(int),), 3)), workdir.unpack_stats),
    "predictors.npz": (workdir.pack_predictors(KEPT), workdir.unpack_predictors),
    "thresholds.json": (workdir.pack_thresholds(KEPT), lambda part: workdir.unpack_thresholds(part, KEPT)),
    "placement.json": (
        workdir.pack_placement(Placement((MASK,), "optimal", 0, 0, 0, 0, 0)),
        lambda part: workdir.unpack_placement(part, (3,)),
    ),
}
"""By the files that they are in: artefacts, and what reads them."""


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("profile.npz", "num_tokens"),
        ("predictors.npz", "layers"),
        ("predictors.npz", "reports"),
        ("thresholds.json", "reports"),
        ("placement.json", "layers"),
        ("placement.json", "limits"),
        ("placement.json", "status"),
    ],
)
def test_whole_artefact_that_lacks_something_is_refused(file, key):
    artefact, unpack_fn = WHOLE[file]
    unpack_fn(artefact)
    del (record := dict(artefact.record))[key]
    with pytest.raises(ValueError, match=f"workdir's {file} is not as .*{key}.*; delete it, and pjax.run"):
        unpack_fn(artefact._replace(record=record))


def test_the_format_stands_for_this_layout():
    """Whoever changes what is written changes FORMAT too, and then this list."""
    found = {file: " ".join([*artefact.arrays, *artefact.record]) for file, (artefact, _) in WHOLE.items()}
    assert workdir.FORMAT == 2
    assert found == {
        "profile.npz": "counts.0 num_tokens num_tokens_known",
        "predictors.npz": "bits.0 slope.0 bias.0 threshold.0 counts.0 contributions.0 layers reports",
        "thresholds.json": "reports",
        "placement.json": "status objective bound device_bytes budget_bytes solve_s goal limits next_gib"
        " layers",
    }
    assert list(WHOLE["thresholds.json"][0].record["reports"][0]) == [
        "rank", "recall", "precision", "density", "true_density", "threshold", "bytes",
        "contribution_recall", "kind",
    ]  # fmt: skip


@pytest.mark.parametrize("neurons", [(3,), (3, 3, 3), (3, 4), (4, 3)])
def test_placement_of_other_layers_is_refused(neurons):
    artefact = workdir.pack_placement(Placement((np.ones(3, bool),) * 2, "optimal", 0, 0, 0, 0, 0))
    with pytest.raises(ValueError, match=r"tables for layers of \[3, 3\] neurons, the model's have \["):
        workdir.unpack_placement(artefact, neurons)
