"""What a terminal shows of a report: tables, and single lines."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from pjax.base import MODES, HardwareSpec
from pjax.plan import MemoryPlan, plan_rows


def guard_warning(part: dict[str, Any]) -> str | None:
    """What a reader must know if the quality guard failed.

    Args:
        part: the report's key `quality`.
    """
    if part["guard"] != "failed":
        return None
    errors = part["modes"]["predicted"]["layer_error"]
    worst = ", ".join(f"{layer} ({errors[layer]:.1%})" for layer in part["worst_layers"])
    return (
        f"QUALITY GUARD FAILED, mode predicted changes the answers: {'; '.join(part['faults'])}. "
        f"Worst layers by relative output error: {worst}. mode=None falls back to exact; more of "
        "profile.num_tokens or a higher predictor.recall may help."
    )


def decode_line(report: dict[str, Any]) -> str | None:
    """Where the time and the bytes of a token go in mode predicted; None for a model without predictors."""
    part = report["decode"]
    if part is None:
        return None
    rows = (f"{part[f'rows_{name}']:,.0f} {name}" for name in ("predicted", "computed", "active"))
    return (
        f"mode predicted, a token: predictors {1e3 * part['predictor_s']:.3f} ms, FFNs "
        f"{1e3 * part['ffn_s']:.3f} ms; of {sum(report['model']['neurons']):,} rows {', '.join(rows)}; "
        f"{part['bytes_per_token'] / 1e6:,.1f} MB read"
    )


QUALITY_COLUMNS = ("", "perplexity", "+-", "above dense", "+-", "KL, nats", "same best token")


def quality_rows(part: Mapping[str, Any]) -> list[list[str]]:
    """The modes under `QUALITY_COLUMNS`, from the report's key `quality`; +- is the standard error."""
    rows = []
    for mode, way in part["modes"].items():
        # Rounded first, and 0 added, so that no -0 is shown.
        kl, rise = round(way["kl_mean"], 6) + 0.0, round(way["rise"], 5) + 0.0
        compared = [f"{rise:.3%}", f"{way['rise_error']:.3%}", f"{kl:.6f}", f"{way['top1_agreement']:.2%}"]
        cells = ["-"] * len(compared) if mode == "dense" else compared
        rows.append([mode, f"{way['perplexity']:.4f}", f"{way['error']:.4f}", *cells])
    return rows


def summary_table(report: dict[str, Any]) -> Table:
    """The report's main figures, a row each."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{report['model']['name']}, {report['model']['layers']} layers")
    for column in ("", *MODES):
        table.add_column(column, justify="left" if not column else "right")

    def row(name: str, values: list[float | None], form: str) -> None:
        table.add_row(name, *("-" if value is None else form.format(value) for value in values))

    quality, speed, predictor = report["quality"], report["speed"], report["predictor"]
    profile, placement, executor = report["profile"], report["placement"], report["executor"]
    row("perplexity", [quality[f"perplexity_{mode}"] for mode in MODES], "{:.3f}")
    row("tokens/s", [speed[f"{mode}_tokens_per_s"] for mode in MODES], "{:,.0f}")
    if profile:
        row("neurons used", [1.0, profile["density_mean"], predictor["density_mean"]], "{:.1%}")
        row("recall", [None, None, predictor["recall_mean"]], "{:.1%}")
        hot, neurons = sum(placement["hot_neurons"]), sum(report["model"]["neurons"])
        simulated = ", simulated hardware" if report["hardware"]["source"] == "simulated" else ""
        table.caption = (
            f"placement {placement['status']}: {hot:,} of {neurons:,} neurons hot, "
            f"serving {executor['neuron_load_share']:.1%} of the activations "
            f"({report['hardware']['name']}{simulated}); guard {quality['guard']}"
        )
    return table


def plan_table(plan: MemoryPlan, hardware: HardwareSpec) -> Table:
    """What goes where, a row each."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{hardware.name} ({hardware.source})",
        caption=None if plan.budget else "no device memory: everything runs on the host",
    )
    for column in ("", "device", "host"):
        table.add_column(column, justify="left" if not column else "right")
    for name, *sizes in plan_rows(plan, hardware):
        if name == "together":
            table.add_section()
        table.add_row(name, *(f"{size / 2**20:,.1f} MiB" if size else "-" for size in sizes))
    return table


def placement_rows(part: Mapping[str, Any]) -> list[list[str]]:
    """The layers of the report's key `placement`.

    Each with its number, hot neurons, all neurons, what share of the activations the hot ones serve, expected
    microseconds of device and host, and what keeps more of them from being hot.
    """
    rows = []
    for index, layer in enumerate(part["per_layer"]):
        times = (f"{1e6 * layer[key]:.1f}" for key in ("device_s", "host_s"))
        share, limit = f"{layer['share']:.1%}", layer["limit"] or "-"
        rows.append([str(index), f"{layer['hot']:,}", f"{layer['neurons']:,}", share, *times, limit])
    return rows


def placement_gain(part: Mapping[str, Any]) -> str:
    """What the split is expected to bring, from the report's key `placement`."""
    step, cold = (f"{1e6 * part[key]:,.1f} us" for key in ("step_s", "all_cold_s"))
    more = part["next_gib"]
    gain = f"{1e6 * more:,.1f} us less" if part["goal"] == "latency" else f"{more:,.1f} more active neurons"
    return f"FFNs of a step: {step} expected, {cold} with all neurons on the host; one more GiB: {gain}"


def layer_table(placement: dict[str, Any]) -> Table:
    """A placement layer by layer, from the report's key."""
    table = Table(box=box.SIMPLE_HEAD, title=f"placement by {placement['goal']}")
    for column in ("layer", "hot", "of", "activations", "device us", "host us", "no more because of"):
        table.add_column(column, justify="right")
    for row in placement_rows(placement):
        table.add_row(*row)
    table.caption = placement_gain(placement)
    return table
