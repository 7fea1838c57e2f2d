"""A PowerInfer user's files take the place of stages: the same numbers as PowerInfer, and a whole run."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pjax
from pjax.formats import read_checkpoint
from pjax.formats.powerinfer import read_predictors
from pjax.hardware import hardware_preset
from pjax.imported import (
    import_placement,
    import_predictors,
    import_stats,
    predictors_fingerprint,
    read_imports,
)
from pjax.layers import predicted_ffn_fn
from pjax.model import prompt_positions
from pjax.pipeline import prepare
from pjax.placement import neuron_bytes
from pjax.predictor import predict_mask
from pjax.profiler import measure_predictors
from pjax.settings import make_settings
from tests.cases import find_case
from tests.tiny_model import tiny_ids
from tests.tiny_pickle import save_tensors
from tests.tiny_powerinfer import (
    KINDS,
    write_all,
    write_predictors,
    write_split,
)


@pytest.fixture(scope="module", params=list(KINDS))
def files(request, tmp_path_factory):
    return write_all(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("llama"), "llama", threshold=-0.5)


def walk(decoder, predictors, threshold, ids):
    """(logits, marked, active) of a decoder as PowerInfer runs it, the FFN in numpy.

    Predictors read what the FFN's norm reads: attention and residual together, in Falcon the layer's input.
    """
    positions = prompt_positions(jnp.asarray(ids))
    residual = decoder.embed_ids(jnp.asarray(ids), positions)
    marked, active = [], []
    for layer, (first, second) in zip(decoder.layers, predictors, strict=True):
        attention, _ = layer.attention(layer.attention_norm(residual), positions, None)
        joined = residual + attention
        seen = residual if decoder.config.block == "parallel" else joined
        x = np.asarray(layer.ffn_norm(seen), np.float64)
        scores = np.maximum(np.asarray(seen, np.float64) @ first.T, 0) @ second.T
        ffn = layer.ffn.weights
        up, down = np.asarray(ffn.up, np.float64), np.asarray(ffn.down, np.float64)
        opener = x @ (up if ffn.gate is None else np.asarray(ffn.gate, np.float64)).T
        values = np.maximum(opener, 0) * (1 if ffn.gate is None else x @ up.T)
        marked.append(scores >= threshold)
        active.append(values != 0)
        residual = joined + jnp.asarray(np.where(marked[-1], values, 0) @ down, jnp.float32)
    return np.asarray(decoder.logits(residual)), marked, active


def test_a_model_file_with_predictors_offers_mode_predicted(files):
    llm = pjax.LLM(files.model)
    ids = tiny_ids(2, 12)
    logits, marked, _ = walk(files.decoder, files.own, 0.25, ids)
    assert 0.1 < np.mean(marked) < 0.9
    found = llm.model(ids, ffn_fn=predicted_ffn_fn(llm.predictors))
    np.testing.assert_allclose(found, logits, atol=2e-5)
    assert np.abs(np.asarray(llm.model(ids)) - logits).max() > 0.1  # dense is something else
    assert len(llm.generate([[1, 5]], max_new_tokens=4, mode="predicted")[0].ids) == 4
    assert llm.mode() == "exact"  # nobody measured yet what the predictors do


def test_predictors_from_a_folder_compute_the_same(llama):
    stored = read_predictors(llama.predictors, llama.decoder.config)
    layers, ids = import_predictors(stored), tiny_ids(2, 12)
    logits, *_ = walk(llama.decoder, llama.folder, -0.5, ids)
    ffn_fn = predicted_ffn_fn(pjax.base.Predictors(layers, ()))
    np.testing.assert_allclose(llama.decoder(ids, ffn_fn=ffn_fn), logits, atol=2e-5)


def test_reports_are_those_of_numpy(files):
    """Measured in the dense model, whose masks have no consequences."""
    layers, ids = import_predictors(read_checkpoint(files.model).predictors), tiny_ids(3, 20)
    reports = measure_predictors(files.decoder, layers, ids).reports
    everything = [(np.zeros_like(first), second) for first, second in files.own]
    _, _, active = walk(files.decoder, everything, 0, ids)
    dense_inputs = []

    def watch(layer, x, residual):
        dense_inputs.append(np.asarray(residual, np.float64))
        return layer.ffn.dense(x), None

    files.decoder.run(jnp.asarray(ids), prompt_positions(jnp.asarray(ids)), ffn_fn=watch)
    for report, mask, seen, (first, second) in zip(reports, active, dense_inputs, files.own, strict=True):
        marked = np.maximum(seen @ first.T, 0) @ second.T >= 0.25
        assert report.recall == pytest.approx((marked & mask).sum() / mask.sum(), abs=2e-3)
        assert report.precision == pytest.approx((marked & mask).sum() / marked.sum(), abs=2e-3)
        assert report.density == pytest.approx(marked.mean(), abs=2e-3)
        assert report.true_density == pytest.approx(mask.mean(), abs=2e-3)
        assert report.threshold == pytest.approx(0.25)


@pytest.mark.parametrize(("threshold", "marked"), [(0.0, True), (0.5, False), (-0.5, True)])
def test_a_score_at_the_threshold_is_active(llama, tmp_path, threshold, marked):
    """PowerInfer skips a neuron below the threshold; a dead predictor's score is 0, the default threshold."""
    write_predictors(tmp_path / "p", [(0 * a, b) for a, b in llama.folder], threshold)
    layers = import_predictors(read_predictors(tmp_path / "p", llama.decoder.config))
    x = jnp.ones((1, 32))
    assert (np.asarray(jax.jit(predict_mask)(layers[0], x, x)) == marked).all()
    one = [(np.eye(1, 32, dtype=np.float32), np.full((96, 1), threshold, np.float32))] * 2
    write_predictors(tmp_path / "q", one, threshold)
    layers = import_predictors(read_predictors(tmp_path / "q", llama.decoder.config))
    assert np.asarray(jax.jit(predict_mask)(layers[0], x, x)).all()


def test_real_case():
    llm = pjax.LLM(find_case("gguf") / "powerinfer_names.gguf")
    golden = np.load(find_case("llama_gqa") / "golden.npz")
    np.testing.assert_allclose(llm.model(golden["ids"]), golden["logits"], atol=2e-5)
    assert len(llm.generate([[1, 5, 9]], max_new_tokens=4, mode="predicted")[0].ids) == 4


def test_imported_placements_say_what_they_serve(llama, caplog):
    config, stats = llama.decoder.config, import_stats(tuple(llama.counts))
    hardware, size = hardware_preset("demo"), neuron_bytes(llama.decoder.config, "float32")

    def placed(masks, device_bytes=1 << 20):
        return import_placement(
            tuple(masks), stats, config, hardware, device_bytes=device_bytes, dtype="float32"
        )

    with caplog.at_level(logging.WARNING):
        placement = placed(llama.hot_mask)
    assert not caplog.text and placement.status == "imported"
    best = sum(np.sort(llama.counts[0])[-40:]) / stats.num_tokens
    assert placement.objective == pytest.approx(best) and placement.bound == pytest.approx(best)
    assert placement.device_bytes == 40 * size
    placed([~llama.hot_mask[0], llama.hot_mask[1]])
    assert "of what as many others in the same layers would" in caplog.text
    with pytest.raises(ValueError, match="placement.path: its 40 hot neurons take"):
        placed(llama.hot_mask, 40 * size - 1)


def test_fingerprint_follows_the_files(llama, tmp_path):
    config = llama.decoder.config
    write_predictors(tmp_path / "p", llama.folder, -0.5)
    same = predictors_fingerprint(read_predictors(llama.predictors, config))
    assert predictors_fingerprint(read_predictors(tmp_path / "p", config)) == same
    first, second = llama.folder[1]
    save_tensors(tmp_path / "p" / "model_1.pt", {"fc1.weight": first * 2, "fc2.weight": second})
    assert predictors_fingerprint(read_predictors(tmp_path / "p", config)) != same
    assert predictors_fingerprint(read_checkpoint(llama.model).predictors) != same


def settings_of(files, tmp_path, **parts):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    profile = {"text": str(text), "num_tokens": 1024, **parts.pop("profile", {})}
    quality = {"text": str(text), "num_tokens": 256, "max_perplexity_rise": 1e6, "max_kl": 1e6}
    values = {"model": str(files.model), "prompt": "a fox", "hardware": "demo", "seed": 3}
    return make_settings(values | {"profile": profile, "quality": quality} | parts)


class Reached(Exception):
    """A stage that would begin to work."""


def next_stage(settings, workdir):
    """The first stage that is made again."""

    def stage_fn(name):
        if name != "load":
            raise Reached(name)
        return lambda done, total: None

    with pytest.raises(Reached) as reached:
        prepare(settings, workdir, stage_fn)
    return str(reached.value)


def test_everything_brought_along_runs(files, tmp_path):
    """The whole pipeline on the user's files, then from the workdir."""
    paths = {
        "profile": {"path": str(files.activation)},
        "predictor": {"path": str(files.predictors)},
        "placement": {"path": str(files.split)},
    }
    stages = []

    def stage_fn(name):
        stages.append(name)
        return lambda done, total: None

    settings, workdir = settings_of(files, tmp_path, **paths), tmp_path / "work"
    prepared = prepare(settings, workdir, stage_fn)
    assert stages == ["load", "profile", "predictors", "placement", "quality", "speed"]
    report = prepared.report
    for part, path in (("profile", "profile"), ("predictor", "predictor"), ("placement", "placement")):
        assert report[part]["source"] == paths[path]["path"]
    assert (report["profile"]["tokens"], report["profile"]["density_mean"]) == (None, None)
    assert report["placement"]["status"] == "imported"
    assert report["placement"]["hot_neurons"] == [40, 0]
    assert report["executor"]["kind"] == "two programs"
    assert all(0 < r["recall"] < 1 and r["rank"] == 32 for r in report["predictor"]["per_layer"])
    assert report["quality"]["guard"] == "passed"  # it was told to let everything through
    llm = pjax.LLM(workdir)
    ids = tiny_ids(1, 9)
    logits, *_ = walk(files.decoder, files.folder, 0.0, ids)
    assert llm.mode() == "predicted"
    found = llm.model(ids, ffn_fn=predicted_ffn_fn(llm.predictors))
    np.testing.assert_allclose(found, logits, atol=2e-5)
    assert llm.generate("a fox", max_new_tokens=4).text

    stages.clear()
    assert prepare(settings, workdir, stage_fn).report == report
    assert stages == ["load"]
    recalled = settings_of(files, tmp_path, **paths | {"predictor": paths["predictor"] | {"recall": 0.9}})
    layers = prepare(recalled, tmp_path / "recalled", stage_fn).report["predictor"]["per_layer"]
    assert "thresholds" in stages and 0.9 <= layers[0]["recall"] < 0.91
    assert layers[1]["recall"] == 1  # at random, its scores go beyond what a histogram tells apart
    thresholds = [layer.threshold for layer in pjax.LLM(tmp_path / "recalled").predictors.layers]
    np.testing.assert_allclose(thresholds, [layer["threshold"] for layer in layers])
    save_tensors(files.activation / "activation_1.pt", files.counts[1] + 1)
    assert next_stage(settings, workdir) == "profile"
    save_tensors(files.activation / "activation_1.pt", files.counts[1])
    write_split(files.split, [files.hot_mask[0], np.roll(files.hot_mask[0], 1)])
    assert next_stage(settings, workdir) == "placement"
    write_split(files.split, files.hot_mask)
    (files.predictors / "config.json").write_text('{"sparse_threshold": 0.125}')
    assert next_stage(settings, workdir) == "predictors"
    (files.predictors / "config.json").write_text('{"sparse_threshold": 0.0}')
    # The file's own predictors are others, and training is a choice.
    own = settings_of(files, tmp_path, **paths | {"predictor": {}})
    assert next_stage(own, workdir) == "predictors"
    assert next_stage(settings_of(files, tmp_path), workdir) == "profile"


def test_own_predictors_and_training(llama, tmp_path):
    """Without keys the model's own predictors are taken; "train" trains others."""
    config = llama.decoder.config
    imports = read_imports(settings_of(llama, tmp_path), config)
    assert imports.predictors and imports.predictors.threshold == 0.25
    assert imports.stats is None and imports.hot_mask is None
    assert imports.sources == {
        "profile": "measured", "predictor": str(llama.model), "placement": "solved"
    }  # fmt: skip
    trained = read_imports(settings_of(llama, tmp_path, predictor={"path": "train"}), config)
    assert trained.predictors is None and trained.sources["predictor"] == "trained"
    dense = settings_of(llama, tmp_path, placement={"path": str(llama.split)})
    with pytest.raises(ValueError, match=r"config.placement.path: tiny has the activation 'silu'"):
        read_imports(dense, config.replace(activation="silu"))
