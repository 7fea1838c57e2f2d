"""Tiny models as PowerInfer has them: GGUF file, predictors, statistics and split, written without pjax."""

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from flax import nnx
from gguf import GGMLQuantizationType, quants

from pjax.model import Decoder
from pjax.model_config import Rope
from tests.tiny_model import tiny_decoder
from tests.tiny_pickle import save_tensors

LETTERS = [" ", *"abcdefghijklmnopqrstuvwxyz"]
SHAPE = dict(vocab=259 + len(LETTERS), model=32, neurons=(96, 96), head_dim=8, context=64, rope=Rope(1e4, 8))
RANK = 32
KINDS = {
    "llama": {},
    "falcon": dict(family="falcon", gated=False, norm="layer", norm_bias=True, block="parallel"),
}


class PowerInferFiles(NamedTuple):
    """What a user of PowerInfer has, and what is in it.

    Attributes:
        model: the GGUF file, with predictors.
        predictors: the folder of model_N.pt, other predictors.
        activation: the folder of activation_N.pt.
        split: the .gpuidx file.
        decoder: of the model.
        own: per layer fc1, fc2 of the model's file.
        folder: per layer fc1, fc2 of the folder.
        counts: per layer.
        hot_mask: per layer.
    """

    model: Path
    predictors: Path
    activation: Path
    split: Path
    decoder: Decoder
    own: list[tuple[np.ndarray, np.ndarray]]
    folder: list[tuple[np.ndarray, np.ndarray]]
    counts: list[np.ndarray]
    hot_mask: list[np.ndarray]


def write_all(path: Path, kind: str, *, threshold: float = 0.0) -> PowerInferFiles:
    """Writes everything for a model of a kind into a folder; `threshold` is that of the .pt predictors."""
    rng = np.random.default_rng(3)
    decoder = tiny_decoder(**SHAPE, **KINDS[kind])
    stored = "F16" if kind == "llama" else "Q5_0"
    own = [_random_predictor(rng) for _ in SHAPE["neurons"]]
    own = [tuple(as_stored(part, stored) for part in layer) for layer in own]
    write_model(path / "tiny.powerinfer.gguf", decoder, own, stored)
    folder = [_random_predictor(rng) for _ in SHAPE["neurons"]]
    write_predictors(path / "predictors", folder, threshold)
    counts = [np.minimum(rng.geometric(0.02, n), 900) for n in SHAPE["neurons"]]
    write_counts(path / "activation", counts)
    hot_mask = [np.isin(np.arange(len(c)), np.argsort(-c)[:n]) for c, n in zip(counts, (40, 0), strict=True)]
    split = path / "tiny.powerinfer.gguf.generated.gpuidx"
    write_split(split, hot_mask)
    return PowerInferFiles(
        path / "tiny.powerinfer.gguf", path / "predictors", path / "activation", split,
        decoder, own, folder, counts, hot_mask,
    )  # fmt: skip


def _random_predictor(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    width, neurons = SHAPE["model"], SHAPE["neurons"][0]
    return (
        rng.normal(size=(RANK, width)).astype(np.float32),
        (rng.normal(size=(neurons, RANK)) + 0.1).astype(np.float32),
    )


def as_stored(array: np.ndarray, kind: str) -> np.ndarray:
    """The numbers that are left of an array when it is stored in a type."""
    stored = GGMLQuantizationType[kind]
    return quants.dequantize(quants.quantize(array, stored), stored)


def write_model(
    file: Path, decoder: Decoder, predictors: list[tuple[np.ndarray, np.ndarray]], kind: str
) -> None:
    """A model as PowerInfer's converter writes it; predictors in the type `kind`."""
    config, family = decoder.config, decoder.config.family
    writer = gguf.GGUFWriter(file, family)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.model)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.neurons[0])
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    if family == "llama":
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_dimension_count(config.rope.width)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    _add_tokenizer(writer)
    writer.add_float32("powerinfer.sparse_threshold", 0.25)
    weights = {".".join(map(str, p)): np.asarray(v[...]) for p, v in nnx.to_flat_state(nnx.state(decoder))}
    for name, array in _file_tensors(weights, config).items():
        writer.add_tensor(name, array)
    for i, layer in enumerate(predictors):
        for part, array in zip(("fc1", "fc2"), layer, strict=True):
            stored = GGMLQuantizationType[kind]
            writer.add_tensor(f"blk.{i}.{part}.weight", quants.quantize(array, stored), raw_dtype=stored)
    _finish(writer, file)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *LETTERS]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token.replace(" ", "▁") for token in tokens])
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(LETTERS))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(LETTERS))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _file_tensors(weights: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    parallel = config.block == "parallel"
    tensors = {"token_embd.weight": weights["embed.weight"], "output.weight": weights["head.weight"]}
    norms = {"final_norm": "output_norm"}
    for i in range(config.layers):
        source, target = f"layers.{i}", f"blk.{i}"
        norms[f"{source}.attention_norm"] = f"{target}.attn_norm" + ("_2" if parallel else "")
        norms[f"{source}.ffn_norm"] = f"{target}." + ("attn_norm" if parallel else "ffn_norm")
        q, k, v = (weights[f"{source}.attention.{n}.weight"] for n in "qkv")
        if parallel:
            tensors[f"{target}.attn_qkv.weight"] = np.concatenate([q, k, v])
        else:
            tensors |= {f"{target}.attn_{n}.weight": _interleave(w, config) for n, w in (("q", q), ("k", k))}
            tensors[f"{target}.attn_v.weight"] = v
            tensors[f"{target}.ffn_gate.weight"] = weights[f"{source}.ffn.gate"]
        tensors[f"{target}.attn_output.weight"] = weights[f"{source}.attention.o.weight"]
        tensors[f"{target}.ffn_up.weight"] = weights[f"{source}.ffn.up"]
        tensors[f"{target}.ffn_down_t.weight"] = weights[f"{source}.ffn.down"]
    for source, target in norms.items():
        tensors[f"{target}.weight"] = weights[f"{source}.scale"]
        if config.norm_bias:
            tensors[f"{target}.bias"] = weights[f"{source}.bias"]
    return tensors


def _interleave(weight: np.ndarray, config) -> np.ndarray:
    halves = weight.reshape(-1, 2, config.head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write_predictors(folder: Path, layers: list[tuple[np.ndarray, np.ndarray]], threshold: float) -> None:
    """The folder that PowerInfer's converters ask for."""
    folder.mkdir()
    (folder / "README.md").write_text("Predictors.")
    (folder / "config.json").write_text(f'{{"sparse_threshold": {threshold}}}')
    for i, (first, second) in enumerate(layers):
        save_tensors(folder / f"model_{i}.pt", {"fc1.weight": first, "fc2.weight": second})


def write_counts(folder: Path, counts: list[np.ndarray]) -> None:
    """The folder `activation` beside PowerInfer's models."""
    folder.mkdir()
    for i, layer in enumerate(counts):
        save_tensors(folder / f"activation_{i}.pt", layer)


def write_split(file: Path, hot_mask: list[np.ndarray], *, buckets: bool = True) -> None:
    """The split that PowerInfer's solver leaves beside a model; the last layer comes first."""
    writer = gguf.GGUFWriter(file, "generic.gpu_index")
    writer.add_block_count(len(hot_mask))
    writer.add_uint64("split.vram_capacity", 1 << 20)
    for i, mask in reversed(list(enumerate(hot_mask))):
        writer.add_tensor(f"blk.{i}.gpu_idx", mask.astype(np.int32))
        if buckets:
            writer.add_tensor(f"blk.{i}.gpu_bucket", np.flatnonzero(mask).astype(np.int32))
    _finish(writer, file)


def _finish(writer: gguf.GGUFWriter, file: Path) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with file.open("r+b") as stream:
        stream.write(b"PWRI")
