"""Predictors, statistics and splits of PowerInfer: read in order, and refused if anything is wrong."""

import numpy as np
import pytest

from pjax.formats.powerinfer import read_counts, read_hot_mask, read_predictors
from pjax.imported import (
    import_predictors,
    import_stats,
)
from tests.cases import find_case
from tests.tiny_model import tiny_config
from tests.tiny_pickle import save_tensors
from tests.tiny_powerinfer import (
    write_all,
    write_counts,
    write_predictors,
    write_split,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("llama"), "llama", threshold=-0.5)


def test_twelve_layers_come_in_order(tmp_path):
    """In alphabetical order, layer 10 would be the third."""
    config = tiny_config(neurons=(24,) * 12)
    write_counts(tmp_path / "activation", [np.full(24, i) for i in range(12)])
    assert [c[0] for c in read_counts(tmp_path / "activation", config)] == list(range(12))
    layer = (np.zeros((4, 16), np.float32), np.zeros((24, 4), np.float32))
    write_predictors(
        tmp_path / "p", [(first + i, second) for i, (first, second) in enumerate([layer] * 12)], 0
    )
    found = import_predictors(read_predictors(tmp_path / "p", config))
    assert [float(predictor.first[0, 0]) for predictor in found] == list(range(12))
    masks = [np.arange(24) == i for i in range(12)]
    write_split(tmp_path / "m.gpuidx", masks)
    np.testing.assert_array_equal(read_hot_mask(tmp_path / "m.gpuidx", config), masks)


def test_counts_and_split_without_buckets(llama, tmp_path):
    config = llama.decoder.config
    counts = read_counts(llama.activation, config)
    np.testing.assert_array_equal(counts, llama.counts)
    write_counts(tmp_path / "floats", [c.astype(np.float32) for c in llama.counts])
    np.testing.assert_array_equal(read_counts(tmp_path / "floats", config), llama.counts)
    stats = import_stats(counts)
    assert stats.num_tokens == max(c.max() for c in llama.counts) and not stats.num_tokens_known
    write_split(tmp_path / "m.gpuidx", llama.hot_mask, buckets=False)
    np.testing.assert_array_equal(read_hot_mask(tmp_path / "m.gpuidx", config), llama.hot_mask)


def test_predictors_with_torch(tmp_path, llama):
    torch = pytest.importorskip("torch", reason="writes the files with PyTorch itself")
    for i, (first, second) in enumerate(llama.folder):
        state = {"fc1.weight": torch.from_numpy(first), "fc2.weight": torch.from_numpy(second).half()}
        torch.save(state, tmp_path / f"model_{i}.pt")
        torch.save(torch.from_numpy(llama.counts[i]), tmp_path / f"activation_{i}.pt")
    config = llama.decoder.config
    for predictor, (first, second) in zip(
        import_predictors(read_predictors(tmp_path, config)), llama.folder, strict=True
    ):
        np.testing.assert_array_equal(predictor.first, first)
        np.testing.assert_array_equal(predictor.second, second.astype(np.float16))
    np.testing.assert_array_equal(read_counts(tmp_path, config), llama.counts)


def remove(name):
    return lambda folder: (folder / name).unlink()


def copy(name, to):
    return lambda folder: (folder / to).write_bytes((folder / name).read_bytes())


def save(name, value):
    return lambda folder: save_tensors(folder / name, value)


def floats(*shape):
    return np.zeros(shape, np.float32)


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("model_1.pt"), "model_1.pt is missing"),
        (copy("model_1.pt", "model_2.pt"), "model_2.pt: there is no such layer"),
        (copy("model_1.pt", "model_01.pt"), "which one is layer 1"),
        (save("model_1.pt", floats(96)), "model_1.pt: expected a dict of fc1.weight and fc2.weight"),
        (save("model_1.pt", {"fc1.weight": floats(8, 32)}), "model_1.pt: expected a dict"),
        (save("model_0.pt", {"fc1.weight": floats(8, 16), "fc2.weight": floats(96, 8)}), "model_0.pt: fc1"),
        (save("model_0.pt", {"fc1.weight": floats(8, 32), "fc2.weight": floats(95, 8)}), "model_0.pt: fc2"),
        (save("model_0.pt", {"fc1.weight": floats(8, 32), "fc2.weight": floats(96, 9)}), "model_0.pt: fc2"),
        (
            save("model_0.pt", {"fc1.weight": floats(8, 32).astype(int), "fc2.weight": floats(96, 8)}),
            "float16",
        ),
        (text("model_0.pt", "version https://git-lfs.github.com/spec/v1"), "Git LFS pointer"),
        (text("config.json", '{"sparse_threshold": "0"}'), "sparse_threshold"),
        (text("config.json", '{"sparse_threshold": 1e40}'), "sparse_threshold"),
    ],
)
def test_damaged_predictors(llama, tmp_path, damage, message):
    write_predictors(tmp_path / "p", llama.folder, 0)
    damage(tmp_path / "p")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_predictors(tmp_path / "p", llama.decoder.config)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("activation_0.pt"), "activation_0.pt is missing"),
        (copy("activation_0.pt", "activation_2.pt"), "there is no such layer"),
        (save("activation_0.pt", np.arange(95)), r"activation_0.pt: expected one tensor of 96 counts"),
        (save("activation_0.pt", {"a": np.arange(96)}), "found a dict"),
        (save("activation_1.pt", np.arange(96) - 1), "activation_1.pt: expected whole numbers"),
        (save("activation_1.pt", floats(96) + 0.5), "expected whole numbers"),
        (save("activation_1.pt", floats(96) + np.float32("nan")), "expected whole numbers"),
    ],
)
def test_damaged_statistics(llama, tmp_path, damage, message):
    write_counts(tmp_path / "a", llama.counts)
    damage(tmp_path / "a")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_counts(tmp_path / "a", llama.decoder.config)


def test_wrong_splits(llama, tmp_path):
    config, file, mask = llama.decoder.config, tmp_path / "m.gpuidx", np.arange(96) < 5

    def refused(message):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            read_hot_mask(file, config)

    refused("m.gpuidx")
    for masks, message in (
        ([mask], "expected layers 0 to 1 of tiny, found 0"),
        ([mask] * 3, "found 0, 1, 2"),
        ([mask, mask[:95]], "blk.1.gpu_idx: expected 96 entries"),
        ([mask, mask * 2], "expected 0 and 1"),
    ):
        write_split(file, masks)
        refused(message)
    write_split(file, [mask, mask])
    raw = file.read_bytes()
    numbers = np.arange(5, dtype=np.int32).tobytes()
    file.write_bytes(raw[::-1].replace(numbers[::-1], numbers[::-1][4:] + b"\0\0\0\x09", 1)[::-1])
    refused("gpu_bucket lists other neurons")
    file.write_bytes(llama.model.read_bytes())
    refused("expected a split")


def test_other_models_are_refused(llama):
    other = tiny_config(neurons=(24, 40))
    for read_fn, path in (
        (read_predictors, llama.predictors),
        (read_predictors, llama.model),
        (read_counts, llama.activation),
        (read_hot_mask, llama.split),
        (read_predictors, find_case("gguf") / "good_f32.gguf"),
        (read_predictors, llama.model.parent / "nothing"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=str(path)):
            read_fn(path, other)
