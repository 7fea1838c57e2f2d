"""Predictors of small models against what they must find; the same after a kill, and in bounded memory."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax import profiler
from pjax.hardware import hardware_preset
from pjax.predictor import LayerCost, predict_mask
from pjax.profiler import collect_stats
from pjax.thresholds import set_recall
from pjax.training import streaming, train, train_predictors
from pjax.training.streaming import Course
from tests.tiny_model import ffn_inputs, ffn_values, tiny_decoder, tiny_ids


def numpy_ffn(model, ids):
    """(values, openers) per layer, see `ffn_values`."""
    inputs = ffn_inputs(model, ids)
    return zip(*(ffn_values(layer, x) for layer, x in zip(model.layers, inputs, strict=True)), strict=True)


def leaves(predictors):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(predictors.layers)]


def test_predictors_reach_the_recall_on_held_out_tokens(monkeypatch):
    monkeypatch.setattr(streaming, "STEP_TOKENS", 42)
    monkeypatch.setattr(streaming, "PASSES", 8)
    model, ids = tiny_decoder(neurons=(24, 24)), tiny_ids(48, 16)
    predictors = train_predictors(model, ids, recall=0.9, every_layer=True)
    held_out = ids[::8]
    values, _ = numpy_ffn(model, held_out)
    for layer, predictor, report, layer_values, x in zip(
        model.layers, predictors.layers, predictors.reports, values, ffn_inputs(model, held_out), strict=True
    ):
        x = jnp.asarray(x, jnp.float32)
        marked, active = np.asarray(jax.jit(predict_mask)(predictor, x, x)), layer_values != 0
        one = 2 / active.sum()  # tokens that lie on the threshold
        assert report.recall >= 0.9
        assert (marked & active).sum() / active.sum() == pytest.approx(report.recall, abs=one)
        assert (marked & active).sum() / marked.sum() == pytest.approx(report.precision, abs=one)
        assert marked.mean() == pytest.approx(report.density, abs=one)
        assert active.mean() == pytest.approx(report.true_density, abs=one)
        assert report.precision > report.true_density + 0.05  # better than chance
        assert report.rank == 32
        contribution = np.abs(layer_values) * np.linalg.norm(np.asarray(layer.ffn.weights.down), axis=1)
        expected = contribution[marked].sum() / contribution.sum()
        assert report.contribution_recall == pytest.approx(expected, abs=0.02)
        assert predictor.input == "normed"
        assert float(predictor.threshold) == report.threshold


def test_training_is_deterministic_and_bounded(monkeypatch):
    model, ids = tiny_decoder(neurons=(24, 24)), tiny_ids(18, 12)
    monkeypatch.setattr(profiler, "TOKENS_PER_BATCH", 60)
    observe, sizes, progress = streaming.observe, [], []

    def watched(graphdef, state, ids):
        sizes.append(ids.size)
        return observe(graphdef, state, ids)

    monkeypatch.setattr(streaming, "observe", watched)

    def train(seed):
        predictors = train_predictors(
            model,
            ids,
            rank=4,
            seed=seed,
            every_layer=True,
            progress_fn=lambda done, total: progress.append((done, total)),
        )
        return jax.tree.leaves(predictors.layers), predictors.reports

    first, reports = train(seed=1)
    assert max(sizes) <= 60
    assert sum(sizes) == 15 * 12  # each sequence is observed once
    assert progress == [(5, 18), (10, 18), (15, 18), (18, 18)]
    again, reports_again = train(seed=1)
    other, _ = train(seed=2)
    assert reports == reports_again
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    assert all(report.rank == 4 for report in reports)


def test_held_out_sequences_are_not_trained_on():
    model, ids = tiny_decoder(neurons=(24, 24)), tiny_ids(9, 12)
    other = ids.copy()
    other[::8] = tiny_ids(2, 12, seed=5)
    first, second = (train_predictors(model, text, rank=8, every_layer=True) for text in (ids, other))
    for a, b in zip(first.layers, second.layers, strict=True):
        np.testing.assert_array_equal(a.first, b.first)
        np.testing.assert_array_equal(a.bias, b.bias)
    assert first.reports != second.reports


@pytest.mark.parametrize("kind", ["lowrank", "sign"])
def test_dead_and_always_on_layers(kind):
    model, ids = tiny_decoder(neurons=(24, 24), mlp_bias=True), tiny_ids(4, 12)
    for layer, bias in zip(model.layers, (-1e3, 1e3), strict=True):
        layer.ffn.gate_bias.set_value(jnp.full(24, bias))
    assert collect_stats(model, ids).density_per_layer == (0.0, 1.0)
    predictors = train_predictors(model, ids, recall=0.95, kind=kind, every_layer=True)
    json.dumps([report._asdict() for report in predictors.reports], allow_nan=False)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(predictors.layers))
    dead, on = predictors.reports
    assert (dead.recall, dead.density, dead.true_density) == (1.0, 0.0, 0.0)
    assert on.recall >= 0.95
    assert (on.precision, on.true_density) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recall": 1.5}, "recall: expected"),
        ({"rank": 0}, "rank: expected at least 1"),
        ({"rank": -3}, "rank"),
        ({"kind": "forest"}, "kind: expected one of lowrank, sign, none, got 'forest'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        train_predictors(tiny_decoder(), tiny_ids(2, 4), **arguments)


def test_one_sequence_cannot_be_held_out():
    with pytest.raises(ValueError, match=r"ids: expected at least two sequences.* got 1"):
        train_predictors(tiny_decoder(), tiny_ids(1, 8))


def test_the_recall_changes_thresholds_only():
    model, ids = tiny_decoder(neurons=(24, 24)), tiny_ids(18, 12)
    first, second = (train_predictors(model, ids, recall=r, every_layer=True) for r in (0.8, 0.99))
    assert all(map(np.array_equal, jax.tree.leaves(first.histograms), jax.tree.leaves(second.histograms)))
    again = set_recall(first, 0.99)
    assert again.reports == second.reports
    assert all(map(np.array_equal, leaves(again), leaves(second)))


@pytest.mark.parametrize("kind", ["lowrank", "sign", "none"])
def test_a_layer_where_no_predictor_pays_has_none(kind, monkeypatch):
    model, ids, said = tiny_decoder(neurons=(24, 24)), tiny_ids(18, 12), []
    # Reading a whole layer costs nothing, so only a predictor could cost something.
    monkeypatch.setattr(LayerCost, "without", 0.0)
    predictors = train_predictors(model, ids, kind=kind, say_fn=said.append)
    assert predictors.layers == (None, None)
    assert [(r.kind, r.recall, r.density, r.bytes, r.rank) for r in predictors.reports] == [
        ("none", 1.0, 1.0, 0, 0)
    ] * 2
    assert [r.true_density for r in predictors.reports] == [r.precision for r in predictors.reports]
    assert 0 < predictors.reports[0].true_density < 1
    assert ("layer 1: no predictor pays; it runs exact" in said) == (kind != "none")
    kept = train_predictors(model, ids, kind=kind, every_layer=True)
    assert [r.kind for r in kept.reports] == [kind] * 2


def test_costs_are_those_of_the_host():
    model, hardware = tiny_decoder(mlp_bias=True), hardware_preset("demo")
    hardware = dataclasses.replace(hardware, host_bytes_per_s=8.0, host_gather_bytes_per_s=4.0)
    cost = train.layer_costs(model, hardware)[1]
    assert cost == LayerCost(40, 16 * 4 + 8 / 3, 8.0, 4.0)  # a third of a neuron's rows and biases
    assert train.layer_costs(model, None)[1] == cost._replace(bytes_per_s=1.0, gather_bytes_per_s=1.0)


def test_a_killed_training_goes_on_to_the_same_result(tmp_path, monkeypatch):
    pytest.importorskip("orbax.checkpoint", reason="checkpoints are Orbax's")
    model, ids = tiny_decoder(neurons=(24, 24)), tiny_ids(48, 12)
    monkeypatch.setattr(profiler, "TOKENS_PER_BATCH", 60)
    monkeypatch.setattr(streaming, "CHECKPOINT_S", 0.0)
    said: list[str] = []
    where = {"checkpoints": tmp_path / "kept", "every_layer": True, "say_fn": said.append}
    whole = train_predictors(model, ids, every_layer=True)

    def die(done, total):
        if done >= 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_predictors(model, ids, progress_fn=die, **where)
    trials, seen = len(said), []
    again = train_predictors(model, ids, progress_fn=lambda done, total: seen.append(done), **where)
    assert len(said) == trials > 0  # the ranks were kept
    assert seen[0] == 25  # and what was trained before the batch in which it died
    assert again.reports == whole.reports
    assert all(map(np.array_equal, leaves(again), leaves(whole)))
    other = train_predictors(model, ids, seed=1, **where)  # what is kept is not of this training
    assert not np.array_equal(leaves(other)[0], leaves(whole)[0])


def test_damaged_checkpoints_are_not_used(tmp_path, caplog):
    pytest.importorskip("orbax.checkpoint", reason="checkpoints are Orbax's")
    model, ids = tiny_decoder(neurons=(24, 24)), tiny_ids(18, 12)
    fits = tmp_path / "fits" / "3"
    fits.mkdir(parents=True)
    (fits / "arrays").write_text("no checkpoint")
    predictors = train_predictors(model, ids, rank=4, every_layer=True, checkpoints=tmp_path)
    assert predictors.reports == train_predictors(model, ids, rank=4, every_layer=True).reports


def test_a_plateau_begins_the_decay():
    course = Course(begin=100, length=100, weight=1.0)
    for batch in range(80):
        course = course.after(batch, 200, batch_loss=max(1.0 - batch / 40, 0.25))
    assert 45 < course.begin < 70 and course.length == course.begin
    assert course.decayed(course.begin) == 0 and course.decayed(2 * course.begin) == 1
    falling = Course(begin=100, length=100, weight=1.0)
    for batch in range(150):
        falling = falling.after(batch, 200, batch_loss=0.99**batch)
    assert (falling.begin, falling.length, falling.decayed(150)) == (100, 100, 0.5)
    assert len(falling.losses) == 150
