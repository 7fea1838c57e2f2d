"""What PowerInfer keeps beside a model: predictors and activation counts from PyTorch, and splits of neurons.

Layers are found by the number in a name: in alphabetical order, layer 10 would come before layer 2.
"""

import os
import re
from functools import partial
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from pjax.formats.checkpoint import SourceTensor, StoredPredictors
from pjax.formats.files import expand_path, read_json
from pjax.formats.gguf_file import GgufFile, GgufTensor, open_gguf
from pjax.formats.gguf_model import read_gguf
from pjax.formats.pickled import read_pickle
from pjax.model_config import ModelConfig
from pjax.weights import BFLOAT16

_FLOAT_TYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_SPLIT_ARCHITECTURE = "generic.gpu_index"


def read_predictors(path: str | os.PathLike[str], config: ModelConfig) -> StoredPredictors:
    """Opens PowerInfer's predictors; checks all of them, reads no weight yet.

    Args:
        path: a folder of `model_0.pt`, `model_1.pt` and so on, perhaps with a `config.json` that has the key
            `sparse_threshold`; or a PowerInfer GGUF file that has predictors.
        config: of the model that they belong to.

    Raises:
        FileNotFoundError: no such folder or file, or a layer is missing.
        ValueError: a damaged file, other contents than predictors, or those of another model.
    """
    path = expand_path(path)
    if path.is_file():
        return _predictors_of_gguf(path, config)
    files = _numbered_files(path, "model", config)
    layers = tuple(
        _open_layer(file, config, neurons) for file, neurons in zip(files, config.neurons, strict=True)
    )
    threshold = 0.0
    if (path / "config.json").is_file():
        threshold = read_json(path / "config.json").get("sparse_threshold", 0.0)
    if type(threshold) not in (int, float) or not abs(threshold) <= _FLOAT32_MAX:
        raise ValueError(
            f"{path / 'config.json'}: sparse_threshold: expected a float32 number, found {threshold!r}."
        )
    return StoredPredictors(layers, float(threshold))


def read_counts(path: str | os.PathLike[str], config: ModelConfig) -> tuple[np.ndarray, ...]:
    """Reads how often each neuron was active.

    Args:
        path: a folder of `activation_0.pt`, `activation_1.pt` and so on, one tensor of counts in each.
        config: of the model that was observed.

    Returns:
        int64 [neurons] per layer.

    Raises:
        FileNotFoundError: no such folder, or a layer is missing.
        ValueError: a damaged file, other contents than counts, or those of another model.
    """
    files = _numbered_files(expand_path(path), "activation", config)
    return tuple(
        _read_layer_counts(file, neurons) for file, neurons in zip(files, config.neurons, strict=True)
    )


def read_hot_mask(path: str | os.PathLike[str], config: ModelConfig) -> tuple[np.ndarray, ...]:
    """Reads which neurons PowerInfer placed on the GPU.

    Args:
        path: a file such as `model.gguf.generated.gpuidx`.
        config: of the model that was split.

    Returns:
        bool [neurons] per layer.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a damaged or contradictory file, other contents than a split, or that of another model.
    """
    file = open_gguf(path)
    if file.metadata.get("general.architecture") != _SPLIT_ARCHITECTURE:
        raise ValueError(
            f"{file.path}: expected a split that PowerInfer made ({_SPLIT_ARCHITECTURE}), found "
            f"{file.metadata.get('general.architecture')!r}."
        )
    parts = (re.fullmatch(r"blk\.(\d{1,9})\.gpu_idx", name) for name in file.tensors)
    numbers = sorted(int(part[1]) for part in parts if part)
    if numbers != list(range(config.layers)):
        raise ValueError(
            f"{file.path}: expected layers 0 to {config.layers - 1} of {config.name}, found "
            f"{', '.join(map(str, numbers[:40])) or 'none'}; is it the split of another model?"
        )
    return tuple(_read_layer_mask(file, index, neurons) for index, neurons in enumerate(config.neurons))


def _numbered_files(folder: Path, stem: str, config: ModelConfig) -> list[Path]:
    """The files `stem_0.pt` to `stem_{layers - 1}.pt`, neither fewer nor more."""
    wanted = f"{stem}_0.pt to {stem}_{config.layers - 1}.pt, one for each layer of {config.name}"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected one with {wanted}.")
    found: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        number = re.fullmatch(rf"{stem}_(\d+)\.pt", file.name)
        if not number:
            continue
        index = int(number[1])
        if index in found:
            raise ValueError(f"{file}: {found[index].name} is there, too; which one is layer {index}?")
        if index >= config.layers:
            raise ValueError(f"{file}: there is no such layer; expected {wanted}. Are they another model's?")
        found[index] = file
    for index in range(config.layers):
        if index not in found:
            raise FileNotFoundError(f"{folder / f'{stem}_{index}.pt'} is missing; expected {wanted}.")
    return [found[index] for index in range(config.layers)]


def _open_layer(file: Path, config: ModelConfig, neurons: int) -> tuple[SourceTensor, SourceTensor]:
    found = read_pickle(file)
    names = ("fc1.weight", "fc2.weight")
    if not isinstance(found, dict) or set(found) != set(names):
        inside = ", ".join(map(str, found)) if isinstance(found, dict) else f"a {type(found).__name__}"
        raise ValueError(f"{file}: expected a dict of {' and '.join(names)}, found {inside[:80]}.")
    for name in names:
        if not isinstance(found[name], np.ndarray) or found[name].dtype not in _FLOAT_TYPES:
            raise ValueError(f"{file}: {name}: expected a tensor of float32, float16 or bfloat16.")
    first, second = (found[name] for name in names)
    rank = first.shape[0] if first.ndim else 0
    shapes = {"fc1.weight": (rank, config.model), "fc2.weight": (neurons, rank)}
    for name, shape in shapes.items():
        if found[name].shape != shape or not rank:
            raise ValueError(
                f"{file}: {name}: expected shape {list(shape)} for {config.name}, found "
                f"{list(found[name].shape)}; is it the predictor of another model or layer?"
            )
    views = {name: partial(np.asarray, found[name]) for name in names}
    first, second = (
        SourceTensor(name, str(file), views[name], shape, found[name].dtype, views[name])
        for name, shape in shapes.items()
    )
    return first, second


def _predictors_of_gguf(path: Path, config: ModelConfig) -> StoredPredictors:
    checkpoint = read_gguf(path, activation=config.activation)
    found = checkpoint.config
    if (found.model, found.neurons) != (config.model, config.neurons):
        raise ValueError(
            f"{path}: its predictors are for width {found.model} and {list(found.neurons)} neurons, but "
            f"{config.name} has width {config.model} and {list(config.neurons)} neurons."
        )
    if checkpoint.predictors is None:
        raise ValueError(f"{path} has no predictors (blk.N.fc1, blk.N.fc2).")
    return checkpoint.predictors


def _read_layer_counts(file: Path, neurons: int) -> np.ndarray:
    found = read_pickle(file)
    if not isinstance(found, np.ndarray) or found.shape != (neurons,):
        kind = f"shape {list(found.shape)}" if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
        raise ValueError(
            f"{file}: expected one tensor of {neurons} counts, found {kind}; is it of another model or layer?"
        )
    counts = found.astype(np.float64)  # some count in floats
    if not np.all((counts >= 0) & (counts < 2**53) & (counts == np.floor(counts))):  # NaN fails, too
        raise ValueError(
            f"{file}: expected whole numbers of at least 0, how often each neuron was active, found "
            f"{counts.min()} to {counts.max()}."
        )
    return counts.astype(np.int64)


def _read_layer_mask(file: GgufFile, index: int, neurons: int) -> np.ndarray:
    name, bucket = f"blk.{index}.gpu_idx", f"blk.{index}.gpu_bucket"
    flags = _read_int32(file, name)
    if flags.shape != (neurons,):
        raise ValueError(
            f"{file.path}: {name}: expected {neurons} entries, one a neuron, found {len(flags)}; is it the "
            "split of another model?"
        )
    if not np.isin(flags, (0, 1)).all():
        raise ValueError(f"{file.path}: {name}: expected 0 and 1, found {flags.min()} to {flags.max()}.")
    # Some versions of PowerInfer write the hot neurons' numbers, too.
    if bucket in file.tensors and not np.array_equal(_read_int32(file, bucket), np.flatnonzero(flags)):
        raise ValueError(
            f"{file.path}: {bucket} lists other neurons than {name} marks; make the split again."
        )
    return flags == 1


def _read_int32(file: GgufFile, name: str) -> np.ndarray:
    tensor: GgufTensor | None = file.tensors.get(name)
    if tensor is None:
        raise ValueError(f"{file.path} lacks the tensor {name}.")
    if tensor.type != GGMLQuantizationType.I32 or len(tensor.shape) != 1:
        raise ValueError(
            f"{file.path}: {name}: expected a list of I32, found {tensor.type.name} {list(tensor.shape)}."
        )
    return tensor.read_rows(0, 1).view("<i4")[0]
