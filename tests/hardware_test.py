"""Presets against the published figures, and measurements against each other."""

import dataclasses
import math
import time

import jax.numpy as jnp
import pytest

from pjax import hardware
from pjax.base import HardwareSpec
from pjax.hardware import find_hardware, hardware_preset, measure_hardware
from pjax.placement import check_hardware, min_hot_neurons


@pytest.mark.parametrize(("name", "device_gb", "device_gb_per_s", "host_gb", "host_gb_per_s"), [
    ("rtx4090-i9-13900k", 24, 1008, 192, 67.2),
    ("rtx2080ti-i7-12700k", 11, 616, 64, 38.4),
    ("h200", 141, 4800, 1000, 307.2),
])  # fmt: skip
def test_presets_are_the_published_machines(name, device_gb, device_gb_per_s, host_gb, host_gb_per_s):
    spec = hardware_preset(name)
    check_hardware(spec)
    assert (spec.name, spec.source) == (name, "preset")
    assert spec.device_bytes == device_gb * 10**9 and spec.host_bytes == host_gb * 10**9
    assert spec.device_bytes_per_s == pytest.approx(device_gb_per_s * 1e9)
    assert spec.host_bytes_per_s == pytest.approx(host_gb_per_s * 1e9)
    assert spec.host_gather_bytes_per_s < spec.host_bytes_per_s


def test_demo_is_simulated_and_ten_times_as_fast():
    spec = hardware_preset("demo")
    check_hardware(spec)
    assert spec.source == "simulated"
    assert spec.device_bytes_per_s == 10 * spec.host_bytes_per_s
    assert spec.sync_s == pytest.approx(2e-6)


def test_unknown_preset_lists_the_names():
    with pytest.raises(ValueError, match="expected one of rtx4090.*, rtx2080ti.*, h200, demo, got 'a100'"):
        hardware_preset("a100")


def test_measured_machine_makes_sense(monkeypatch):
    # A sixteenth of the real sizes: what is checked here is that each number is the one meant.
    monkeypatch.setattr(hardware, "_STREAM_BYTES", hardware._STREAM_BYTES // 16)
    monkeypatch.setattr(hardware, "_GATHER_NEURONS", hardware._GATHER_NEURONS // 16)
    start_s = time.perf_counter()
    spec = measure_hardware()
    elapsed_s = time.perf_counter() - start_s
    check_hardware(spec)
    assert spec.source == "measured"
    assert spec.device_bytes == spec.host_bytes > 2**28
    # A machine of today reads between 10 MB/s and 10 TB/s, and starts a program in less than 0.1 s.
    assert all(1e7 < rate < 1e13 for rate in (spec.host_bytes_per_s, spec.host_gather_bytes_per_s))
    assert 0 < spec.launch_s < 0.1 and 0 < spec.sync_s < 0.1
    # All streaming passes together fit in the time that passed.
    num_bytes = hardware._STREAM_REPEATS * hardware._STREAM_BYTES
    assert num_bytes / spec.host_bytes_per_s < 2 * elapsed_s


def test_without_an_accelerator_nothing_is_worth_moving(monkeypatch):
    monkeypatch.setattr(hardware, "_measure_stream", lambda device: 30e9)
    monkeypatch.setattr(hardware, "_measure_gather", lambda device: 25e9)
    spec = measure_hardware()
    assert spec.device_bytes_per_s == spec.host_gather_bytes_per_s
    assert min_hot_neurons(10_000, spec) is None


def test_medians_ignore_one_slow_run():
    waits_s = [0.0, 0.0, 0.05, 0.0, 0.0]

    def run(i):
        time.sleep(waits_s[i])
        return jnp.zeros(())

    assert hardware._median_s(run, len(waits_s)) < 0.02


def test_a_measurement_without_sense_is_refused(monkeypatch):
    monkeypatch.setattr(hardware, "_measure_stream", lambda device: math.inf)
    monkeypatch.setattr(hardware, "_measure_gather", lambda device: 25e9)
    with pytest.raises(ValueError, match="host_bytes_per_s: expected a positive finite number, got inf"):
        measure_hardware()


def test_a_missing_host_backend_is_named(monkeypatch):
    def no_backend(platform):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(hardware.jax, "devices", no_backend)
    with pytest.raises(ValueError, match="JAX_PLATFORMS=cuda,cpu"):
        hardware._host_device()


MACHINE = """
name = "laptop"
source = "simulated"
device_bytes = 8e9
host_bytes = 16_000_000_000
device_bytes_per_s = 300e9
host_bytes_per_s = 30e9
host_gather_bytes_per_s = 27e9
launch_s = 0
sync_s = 20e-6
"""


def test_a_machine_by_hand(tmp_path):
    file = tmp_path / "laptop.toml"
    file.write_text(MACHINE)
    spec = find_hardware(str(file))
    expected = HardwareSpec("laptop", "simulated", 8 * 10**9, 16 * 10**9, 300e9, 30e9, 27e9, 0, 20e-6)
    assert spec == expected and isinstance(spec.device_bytes, int)
    assert find_hardware("demo") == hardware_preset("demo")
    with pytest.raises(FileNotFoundError, match="there is no file .*nowhere.toml"):
        find_hardware(str(tmp_path / "nowhere.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(
        ValueError, match=r"folder\.toml: expected a TOML file, cannot read it: Is a directory"
    ):
        find_hardware(str(tmp_path / "folder.toml"))


@pytest.mark.parametrize(("old", "new", "message"), [
    ("sync_s = 20e-6", "", "missing or unknown: sync_s"),
    ("sync_s", "sinc_s", "missing or unknown: sinc_s, sync_s"),
    ("sync_s = 20e-6", "sync_s = -1", "sync_s: expected a finite number >= 0, got -1"),
    ("sync_s = 20e-6", "sync_s = true", "sync_s: expected a number, got True"),
    ("30e9", "nan", "host_bytes_per_s: expected a positive finite number, got nan"),
    ("8e9", "0", "device_bytes: expected a positive finite number, got 0"),
    ('"laptop"', "3", "name: expected text, got 3"),
    ("simulated", "guessed", "source: expected measured or preset or simulated, got 'guessed'"),
    ("=", ":", "expected a TOML file"),
])  # fmt: skip
def test_a_machine_by_hand_without_sense_is_refused(tmp_path, old, new, message):
    file = tmp_path / "laptop.toml"
    file.write_text(MACHINE.replace(old, new))
    with pytest.raises(ValueError, match=message):
        find_hardware(str(file))


def test_presets_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware_preset("demo").sync_s = 0.0  # pyright: ignore[reportAttributeAccessIssue]
