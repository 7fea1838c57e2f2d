"""What a run is asked to do: the frozen, checked form of a config file."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from pjax.base import MODES
from pjax.weights import DTYPES


@dataclasses.dataclass(frozen=True)
class ProfileSettings:
    """What the profile and the predictors are made from.

    Attributes:
        text: a .txt or .jsonl file, or "stdlib:calibration".
        num_tokens: at most so many of it.
        path: a folder with the counts of PowerInfer, `activation_0.pt` and so on, instead of a profile; the
            text is then only for the predictors.
    """

    text: str = "stdlib:calibration"
    num_tokens: int = 131072
    path: str | None = None


@dataclasses.dataclass(frozen=True)
class PredictorSettings:
    """Which predictors are used, and how they are trained.

    Attributes:
        path: a folder with predictors of PowerInfer, `model_0.pt` and so on, or a GGUF file of PowerInfer, to
            read instead of training; "train" trains; None takes those in the model's file, or else trains.
        kind: "lowrank", trained; "sign", made of the weights' signs; "none", so that predicted is exact.
        dtype: weight type of those trained here, as `Settings.dtype`.
        recall: share of the active neurons to mark, on held-out tokens, 0..1; changing it trains nothing.
            None leaves predictors that were read their own thresholds, and is 0.95 for others.
        every_layer: whether each layer gets one; else only where it saves time.
    """

    kind: str = "lowrank"
    dtype: str = "q4_0"
    recall: float | None = None
    every_layer: bool = False
    path: str | None = None


@dataclasses.dataclass(frozen=True)
class PlacementSettings:
    """How neurons are placed.

    Attributes:
        device_bytes: what may be on the device: a number, "8GiB", "max" for its memory but a reserve, 0 for
            nothing; or "40%" of the neurons, whatever the rest takes.
        context: tokens of the KV cache that get room on the device, at most the model's context.
        objective: "impact" for the most activations on the device, "latency" for the least time of a step.
        minimum: how "impact" counts the fewest hot neurons of a layer, see `placement.min_hot_neurons`.
        group_size: neurons decided together.
        time_limit_s: of the solver.
        path: a split of PowerInfer, `model.generated.gpuidx`, instead of the solver.
    """

    device_bytes: int | str = "max"
    context: int = 2048
    objective: str = "latency"
    minimum: str = "paper"
    group_size: int = 64
    time_limit_s: float = 30.0
    path: str | None = None


@dataclasses.dataclass(frozen=True)
class GenerateSettings:
    """The arguments of `LLM.generate`."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class QualitySettings:
    """What the quality guard asks for.

    Attributes:
        text: to score; as `ProfileSettings.text`, or "stdlib:evaluation".
        num_tokens: at most so many of it.
        max_perplexity_rise: of predicted over dense, as a fraction.
        max_kl: mean divergence of predicted from dense, in nats; a perplexity 2 % higher is 0.02 nats, too.
    """

    text: str = "stdlib:evaluation"
    num_tokens: int = 16384
    max_perplexity_rise: float = 0.02
    max_kl: float = 0.02


@dataclasses.dataclass(frozen=True)
class Settings:
    """All of it.

    Attributes:
        model: a Hugging Face folder or a GGUF file.
        prompt: text to continue, or a question.
        chat: whether the prompt is a question, which the model's chat template turns into a text.
        activation: overrides the one that the model's file names; None keeps it.
        dtype: storage type of the weights; None keeps the file's.
        mode: see `base.Mode`; None chooses by the quality guard.
        seed: of predictors and sampling.
        hardware: "measured", the name of a preset, or a .toml file, see `hardware.read_hardware`.
        profile: see its class, as the others.
        predictor: of mode "predicted".
        placement: of the neurons.
        generate: how to continue the prompt.
        quality: of the modes.
    """

    model: str
    prompt: str
    chat: bool = False
    activation: str | None = None
    dtype: str | None = None
    mode: str | None = None
    seed: int = 0
    hardware: str = "measured"
    profile: ProfileSettings = ProfileSettings()
    predictor: PredictorSettings = PredictorSettings()
    placement: PlacementSettings = PlacementSettings()
    generate: GenerateSettings = GenerateSettings()
    quality: QualitySettings = QualitySettings()


CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": (None, *DTYPES),
    "mode": (None, *MODES),
    "predictor.kind": ("lowrank", "sign", "none"),
    "predictor.dtype": DTYPES,
    "placement.objective": ("impact", "latency"),
    "placement.minimum": ("paper", "expected"),
}
"""Keys with a fixed set of values."""

RANGES: dict[str, tuple[float, float]] = {
    "profile.num_tokens": (2, 1e12),
    "predictor.recall": (0.0, 1.0),
    "placement.context": (1, 1e9),
    "placement.group_size": (1, 1e9),
    "placement.time_limit_s": (1e-3, 1e6),
    "quality.num_tokens": (2, 1e12),
    "quality.max_perplexity_rise": (0.0, 1e6),
    "quality.max_kl": (0.0, 1e6),
    "seed": (0, 2**63 - 1),
}
"""Keys with a range; those of `generate` are checked where they are used."""


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Checks a config's values.

    Args:
        values: nested mappings, with the keys of `Settings`.

    Raises:
        ValueError: a key is unknown or missing, or a value has the wrong type or range; it names the key.
    """
    settings = _fill(Settings, values, "")
    for key, choices in CHOICES.items():
        if _get(settings, key) not in choices:
            raise ValueError(f"config.{key}: expected one of {list(choices)}, got {_get(settings, key)!r}")
    for key, (low, high) in RANGES.items():
        value = _get(settings, key)
        if value is not None and not low <= value <= high:
            raise ValueError(f"config.{key}: expected {low:g} to {high:g}, got {value!r}")
    return settings


def device_budget(value: int | str, ffn_bytes: int, device_bytes: int) -> int:
    """Bytes of a budget as people write it.

    Args:
        value: a number of bytes, "8GiB", "8GB", "512MiB", "40%" of the neurons, or "max".
        ffn_bytes: of the neurons.
        device_bytes: what "max" means.

    Raises:
        ValueError: if it is none of these, or negative.
    """
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, int):
        raise ValueError(f"placement.device_bytes: expected at least 0, got {value}")
    text = value.strip()
    binary = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    units = {"%": ffn_bytes / 100, **binary, "kB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1, "": 1}
    if text == "max":
        return device_bytes
    for unit, size in units.items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdecimal():
            return int(float(number) * size)
    raise ValueError(f'placement.device_bytes: expected a number, "8GiB", "40%" or "max", got {value!r}')


def _get(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _fill(record: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{f'config.{prefix}'.rstrip('.')}: expected keys and values, got {values!r}")
    hints = typing.get_type_hints(record)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise ValueError(f"config.{prefix}{unknown[0]}: no such key; the keys here are {', '.join(hints)}")
    required = [f.name for f in dataclasses.fields(record) if f.default is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"config.{prefix}{missing[0]}: this key is required")
    return record(**{name: _convert(hints[name], value, prefix + name) for name, value in values.items()})


def _convert(hint: Any, value: Any, key: str) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _fill(hint, value, key + ".")
    if hint == tuple[str, ...]:
        parts = (value,) if isinstance(value, str) else value
        if isinstance(parts, tuple | list) and all(isinstance(part, str) for part in parts):
            return tuple(parts)
        raise ValueError(f"config.{key}: expected strings, got {value!r}")
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(value) in allowed:
        return value
    if float in allowed and type(value) is int:
        return float(value)
    names = " or ".join("None" if t is types.NoneType else t.__name__ for t in allowed)
    raise ValueError(f"config.{key}: expected {names}, got {value!r}")
