"""Runs a decoder token by token: as one program on one device, or split over a device and a host.

The token loop calls plain `jax.jit` functions on plain pytrees, with the KV caches donated. Both
executors sample inside the step, so that a token costs exactly one host read, done by the caller.
"""

import contextlib

import jax

from pjax.base import Mode, Placement, Predictors
from pjax.executor.common import check_mode as check_mode
from pjax.executor.common import mode_ffn_fn as mode_ffn_fn
from pjax.executor.one_program import OneProgram as OneProgram
from pjax.executor.overlap import Overlap as Overlap
from pjax.executor.overlap import measure_overlap as measure_overlap
from pjax.executor.two_programs import TwoPrograms as TwoPrograms
from pjax.model import Decoder


def device_pair(*, simulated: bool) -> tuple[jax.Device, jax.Device] | None:
    """(device, host) to split a model over, or None where there is only one.

    Args:
        simulated: whether a second emulated CPU device may stand in for an accelerator.
    """
    cpus = jax.local_devices(backend="cpu")
    accelerators = [device for device in jax.local_devices() if device.platform != "cpu"]
    if accelerators:
        return accelerators[0], cpus[0]
    return (cpus[1], cpus[0]) if simulated and len(cpus) > 1 else None


def on_host() -> contextlib.AbstractContextManager:
    """Within it arrays are made in host memory, where a model larger than the device fits."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def make_executor(
    model: Decoder,
    placement: Placement | None,
    *,
    mode: Mode,
    predictors: Predictors | None = None,
    simulated: bool = False,
) -> OneProgram | TwoPrograms:
    """The executor that a placement asks for on the devices there are.

    Args:
        model: the decoder, whole.
        placement: None puts everything on the one device.
        mode: see `base.Mode`.
        predictors: for mode "predicted".
        simulated: as in `device_pair`.
    """
    pair = device_pair(simulated=simulated)
    hot = [mask.mean() for mask in placement.hot_mask] if placement is not None else []
    if pair is None or placement is None or min(hot) == 1.0:
        return OneProgram(model, mode=mode, predictors=predictors)
    device, host = pair
    if max(hot) == 0.0:
        return OneProgram(model, mode=mode, predictors=predictors, device=host)
    return TwoPrograms(model, placement.hot_mask, mode=mode, predictors=predictors, device=device, host=host)
