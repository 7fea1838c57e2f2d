"""Plans memory before a weight is read: what has to be on the device, and what is left for hot neurons."""

import dataclasses
import os
from collections import defaultdict
from typing import NamedTuple

import jax
import numpy as np

from pjax.attention import cache_dtype
from pjax.base import VERSION, HardwareSpec
from pjax.formats.checkpoint import Checkpoint, SourceTensor, StoredPredictors, module_types
from pjax.hardware import find_hardware, measure_hardware
from pjax.imported import Imports, read_imports
from pjax.model_config import ModelConfig
from pjax.placement import layer_neuron_bytes
from pjax.predictor import fitting_dtype, most_bytes
from pjax.settings import PlacementSettings, PredictorSettings, Settings, device_budget
from pjax.stages import Stages
from pjax.weights import row_bytes
from pjax.workdir import Artefact, fingerprint, unpacking

RESERVE = 1 / 16
"""Of the device's memory left alone by "max": compiled programs, and what its allocator loses between arrays;
1.5 GB of 24, where PowerInfer leaves 0.25."""


class WeightSizes(NamedTuple):
    """Bytes of a model's weights as `load_model` will hold them.

    Attributes:
        attention: of all layers, with their norms and down biases: all of a layer that is no neuron.
        ends: embedding, learned positions, projections, last norm and head.
        ffn_dtypes: weight type of each layer's neurons.
        embed_dtype: of the embedding.
    """

    attention: int
    ends: int
    ffn_dtypes: tuple[str, ...]
    embed_dtype: str


class MemoryPlan(NamedTuple):
    """Bytes of device memory in the order in which they are given out; the first that fails is refused.

    Attributes:
        predictors: first, as PowerInfer has it: every layer asks them before it does anything else.
        attention: see `WeightSizes`.
        kv_cache: of one sequence of `context` tokens.
        workspace: what a prompt of `context` tokens needs at a time beside it.
        ends: see `WeightSizes`.
        hot: the most that hot neurons may take of what is left.
        ffn: all neurons; those that are not hot are the host's.
        budget: of all that is on the device.
        context: tokens.
    """

    predictors: int
    attention: int
    kv_cache: int
    workspace: int
    ends: int
    hot: int
    ffn: int
    budget: int
    context: int

    @property
    def needed(self) -> int:
        """What has to be on the device before the first hot neuron."""
        return self.predictors + self.attention + self.kv_cache + self.workspace + self.ends


class Planned(NamedTuple):
    """What a run knows before it reads a weight.

    Attributes:
        hardware: the machine.
        imports: what it takes from files.
        memory: what goes where.
        dtypes: weight type of each layer's neurons.
    """

    hardware: HardwareSpec
    imports: Imports
    memory: MemoryPlan
    dtypes: tuple[str, ...]


def make_plan(settings: Settings, checkpoint: Checkpoint, stages: Stages) -> Planned:
    """Opens what is imported, measures the machine, and gives out its memory.

    Args:
        settings: what to do.
        checkpoint: the model.
        stages: of the workdir, which remembers what was measured.

    Raises:
        ValueError, FileNotFoundError: the files are not there or broken, or the budget is too small.
    """
    config = checkpoint.config
    imports = read_imports(settings, config)
    hardware = _hardware(stages, settings)
    sizes = weight_sizes(checkpoint, settings.dtype)
    predictors = 0
    if config.is_sparse and settings.mode in (None, "predicted"):
        predictors = most_predictor_bytes(config, settings.predictor, sizes.ffn_dtypes)
        if imports.predictors is not None:
            predictors = stored_predictor_bytes(imports.predictors)
    memory = plan_memory(sizes, config, hardware, settings.placement, predictors)
    return Planned(hardware, imports, memory, sizes.ffn_dtypes)


def _hardware(stages: Stages, settings: Settings) -> HardwareSpec:
    if settings.hardware != "measured":
        return find_hardware(settings.hardware)
    devices = fingerprint(VERSION, [str(d.device_kind) for d in jax.local_devices()], os.cpu_count())
    record = stages.run(
        "hardware", devices, lambda fn: Artefact({}, dataclasses.asdict(measure_hardware()))
    ).record
    with unpacking("hardware.json"):
        return HardwareSpec(**record)


def weight_sizes(checkpoint: Checkpoint, dtype: str | None) -> WeightSizes:
    """How many bytes the weights of an opened model will have.

    Args:
        checkpoint: the model.
        dtype: as of `load_model`.
    """
    modules: dict[str, dict[str, SourceTensor]] = defaultdict(dict)
    for name, tensor in checkpoint.tensors.items():
        module, _, own = name.rpartition(".")
        modules[module][own] = tensor
    attention = ends = 0
    for module, tensors in modules.items():
        held_as = module_types(tensors, dtype).held_as
        for own, tensor in tensors.items():
            size = _tensor_bytes(tensor, held_as)
            if not module.startswith("layers."):
                ends += size
            elif not module.endswith(".ffn") or own == "down_bias":
                attention += size
    ffns = [modules[f"layers.{index}.ffn"] for index in range(checkpoint.config.layers)]
    ffn_dtypes = tuple(module_types(tensors, dtype).held_as for tensors in ffns)
    return WeightSizes(attention, ends, ffn_dtypes, module_types(modules["embed"], dtype).held_as)


def _tensor_bytes(tensor: SourceTensor, dtype: str) -> int:
    if len(tensor.shape) == 1:
        return 4 * tensor.shape[0]
    return tensor.shape[0] * row_bytes(dtype, tensor.shape[1])


def most_predictor_bytes(config: ModelConfig, wanted: PredictorSettings, ffn_dtypes: tuple[str, ...]) -> int:
    """The most that the predictors of a run can have: their ranks are not known before they are trained.

    Args:
        config: the model.
        wanted: the keys `kind` and `dtype`.
        ffn_dtypes: weight type of each layer's neurons.
    """
    dtype = fitting_dtype(wanted.dtype, config.model)
    sizes = layer_neuron_bytes(config, ffn_dtypes)
    return sum(
        most_bytes(wanted.kind, dtype, config.model, neurons, size)
        for neurons, size in zip(config.neurons, sizes, strict=True)
    )


def stored_predictor_bytes(stored: StoredPredictors) -> int:
    """Of the predictors that a file brings along."""
    total = 0
    for first, second in stored.layers:
        for tensor in (first, second):
            total += int(np.prod(tensor.shape)) * (2 if tensor.dtype == np.float16 else 4)
        total += 4 * second.shape[0] + 4
    return total


def plan_memory(
    sizes: WeightSizes,
    config: ModelConfig,
    hardware: HardwareSpec,
    wanted: PlacementSettings,
    predictors: int,
) -> MemoryPlan:
    """Gives out the device's memory.

    A budget in percent is of the neurons and for them alone; any other is for all that is on the device.
    A budget of 0, like a device without room for anything, leaves everything to the host.

    Args:
        sizes: of the weights.
        config: the model.
        hardware: sizes of device and host.
        wanted: the keys `device_bytes` and `context`.
        predictors: bytes of all layers' predictors.

    Raises:
        ValueError: the budget makes no sense, or is below what has to be on the device, or the host cannot
            hold the rest.
    """
    per_neuron = layer_neuron_bytes(config, sizes.ffn_dtypes)
    ffn = sum(size * neurons for size, neurons in zip(per_neuron, config.neurons, strict=True))
    context = min(wanted.context, config.context)
    kv_numbers = 2 * config.layers * config.kv_heads * config.head_dim * context
    plan = MemoryPlan(
        predictors=predictors,
        attention=sizes.attention,
        kv_cache=kv_numbers * cache_dtype(sizes.embed_dtype).itemsize,
        workspace=_workspace(config, context),
        ends=sizes.ends,
        hot=0,
        ffn=ffn,
        budget=0,
        context=context,
    )
    available = int(hardware.device_bytes * (1 - RESERVE))
    budget = device_budget(wanted.device_bytes, ffn, available)
    if budget == 0:
        return _check_host(plan, plan.needed + ffn, hardware)
    if isinstance(wanted.device_bytes, str) and wanted.device_bytes.strip().endswith("%"):
        budget += plan.needed
    budget = min(budget, hardware.device_bytes)
    if budget < plan.needed:
        parts = "predictors {}, attention {}, KV cache of {} tokens {}, workspace {}, embedding and head {}"
        parts = parts.format(
            plan.predictors, plan.attention, context, plan.kv_cache, plan.workspace, plan.ends
        )
        raise ValueError(
            f"placement.device_bytes: {budget} bytes are less than the {plan.needed} that have to be on the "
            f"device ({parts}); give more, a smaller placement.context, or 0 to leave everything to the host"
        )
    plan = plan._replace(hot=min(budget - plan.needed, ffn), budget=budget)
    return _check_host(plan, ffn - plan.hot, hardware)


def _check_host(plan: MemoryPlan, host_bytes: int, hardware: HardwareSpec) -> MemoryPlan:
    if host_bytes > hardware.host_bytes:
        raise ValueError(
            f"hardware {hardware.name!r}: host_bytes: {hardware.host_bytes} bytes are less than the "
            f"{host_bytes} that the plan leaves to the host; raise placement.device_bytes or use a smaller "
            "dtype"
        )
    return plan


def _workspace(config: ModelConfig, context: int) -> int:
    """Of a prompt and the last token's logits, in float32, as XLA allocated it for decoders of some widths.

    It holds the attention scores of all blocks of queries at once, some of them twice, beside four rows as
    wide as the model and two of the neurons' values.
    """
    scores = 1.25 * config.heads * context**2
    rows = context * (4 * config.model + 2 * max(config.neurons))
    return 4 * int(scores + rows + 2 * config.vocab)


def plan_rows(plan: MemoryPlan, hardware: HardwareSpec) -> list[tuple[str, int, int]]:
    """(what, bytes on the device, bytes on the host) for a table; the last row is what stays free."""
    parts = {
        "predictors": plan.predictors,
        "attention": plan.attention,
        f"KV cache, {plan.context} tokens": plan.kv_cache,
        "workspace": plan.workspace,
        "embedding and head": plan.ends,
    }
    on_device = plan.budget > 0
    rows = [(name, size if on_device else 0, 0 if on_device else size) for name, size in parts.items()]
    rows.append(("FFN, hot and cold", plan.hot, plan.ffn - plan.hot))
    device, host = sum(row[1] for row in rows), sum(row[2] for row in rows)
    rows.append(("together", device, host))
    return [*rows, ("reserve", hardware.device_bytes - device, hardware.host_bytes - host)]
