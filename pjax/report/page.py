"""`report.html`: a report as one file that opens offline, with tables, and pictures where matplotlib is."""

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from pjax.base import MODES, VERSION, ActivationStats
from pjax.report.pictures import can_draw, draw_all, to_svg
from pjax.report.tables import (
    QUALITY_COLUMNS,
    guard_warning,
    placement_gain,
    placement_rows,
    quality_rows,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = {
    "density": "How many neurons of each layer are active for a token.",
    "activations_per_layer": "Which share of a layer's neurons makes which share of its activations.",
    "activations": "The same of all layers together (Fig. 4 of the PowerInfer paper).",
    "recall": "On held-out tokens. Recall: how many of the active neurons the predictor marks, by number and "
    "by contribution, where each counts by how much it moves the output. Precision: how many of those that "
    "it marks are active.",
    "marked": "Neurons that the predictor marks beside those that are active, for a token.",
    "bytes": "What each layer's predictor takes of the memory, and of each token's reading.",
    "errors": "How far the predicted FFN's output is from the dense one's, on the same input, as a share of "
    "its length.",
    "placement": "What each layer has on the device, and how long device and host are expected to take for "
    "a token.",
}
"""What each picture shows."""

_TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}: pjax report</title>
<style>
:root { color-scheme: light dark; --soft: #595959; --line: #d0d0d0; --panel: #f4f4f4; --warning: #b00020; }
@media (prefers-color-scheme: dark) {
:root { --soft: #b4b4b4; --line: #4a4a4a; --panel: #262626; --warning: #ff7a88; }
img { filter: invert(1) hue-rotate(180deg); }
}
body { font-family: sans-serif; line-height: 1.4; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1, p { overflow-wrap: anywhere; }
p { max-width: 45rem; }
.row { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 1.5rem 2.5rem; margin: 1.2rem 0; }
.scroll { overflow-x: auto; }
figure { margin: 0; max-width: 100%; }
figcaption { max-width: 45rem; margin-top: .4rem; color: var(--soft); }
img { display: block; width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; }
th:first-child { text-align: left; }
tbody th { font-weight: normal; }
.warning { color: var(--warning); font-weight: bold; }
pre { background: var(--panel); padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>{{ title }}: pjax report</h1>
{%- for section in sections %}
{% if section.title %}<h2>{{ section.title }}</h2>{% endif %}
{%- if section.warning %}
<p class="warning">{{ section.warning }}</p>
{%- endif %}
{%- if section.note %}
<p>{{ section.note }}</p>
{%- endif %}
{%- for name in section.pictures if name in pictures %}
{%- if loop.first %}
<div class="row">
{%- endif %}
<figure style="width: {{ pictures[name].width }}px"><div class="scroll">
<img style="min-width: {{ pictures[name].least }}px" alt="{{ captions[name] }}"
 src="data:image/svg+xml;base64,{{ pictures[name].data }}">
</div><figcaption>{{ captions[name] }}</figcaption></figure>
{%- if loop.last %}
</div>
{%- endif %}
{%- endfor %}
{%- for table in section.tables %}
{%- if loop.first %}
<div class="row">
{%- endif %}
<figure><div class="scroll"><table>
<thead><tr>{% for cell in table.header %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{%- for row in table.rows %}
<tr><th scope="row">{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody>
</table></div>
{%- if table.caption %}<figcaption>{{ table.caption }}</figcaption>{% endif %}</figure>
{%- if loop.last %}
</div>
{%- endif %}
{%- endfor %}
{%- if section.text %}
<pre>{{ section.text }}</pre>
{%- endif %}
{%- endfor %}
</body>
</html>
"""

PIXELS_PER_INCH = 96
"""Of browsers."""

LEAST_SCALE = 0.6
"""To which a picture may shrink: its letters, of 10 points, stay legible; a wider one is scrolled."""


class Table(NamedTuple):
    """A table of the page: its cells are text, and the first column is that of names."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


class Section(NamedTuple):
    """A part of the page, shown in the order of its attributes; pictures are names in `CAPTIONS`."""

    title: str = ""
    warning: str = ""
    note: str = ""
    pictures: Sequence[str] = ()
    tables: Sequence[Table] = ()
    text: str = ""


class Picture(NamedTuple):
    """A picture of the page: an SVG file in base64, its own width and the least one, in pixels."""

    data: str
    width: int
    least: int


def report_page(report: Mapping[str, Any], stats: ActivationStats | None) -> str:
    """The whole page; every text in it is escaped.

    Args:
        report: the report, see `report`.
        stats: how often each neuron is active, for the pictures; None for a model without zeros.
    """
    sections = [_head(report), _quality(report), _speed(report)]
    if report["predictor"] and report["placement"]:
        sections += [_activations(report), _predictors(report), _placement(report)]
    sections.append(Section("Text", note="The prompt, and what was generated.", text=report["text"]))
    figures = draw_all(report, stats) if can_draw() else {}
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_TEMPLATE)
    return template.render(
        title=report["model"]["name"],
        sections=sections,
        pictures={name: _picture(figure) for name, figure in figures.items()},
        captions=CAPTIONS,
    )


def _picture(figure: "Figure") -> Picture:
    width = PIXELS_PER_INCH * figure.get_figwidth()
    # As an image, not as an element of the page, it keeps its ids and styles to itself.
    data = base64.b64encode(to_svg(figure).encode()).decode()
    return Picture(data, round(width), round(LEAST_SCALE * width))


def _form(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)


def _head(report: Mapping[str, Any]) -> Section:
    model, hardware = report["model"], report["hardware"]
    note = (
        f"{model['family']}, {model['layers']} layers, {model['parameters']:,} parameters in "
        f"{model['bytes'] / 1e6:,.1f} MB; hardware: {hardware['name']} "
        f"({hardware['source']}); pjax {VERSION}."
    )
    if not can_draw():
        note += " Without pictures, as matplotlib is not installed: pip install 'pjax[plots]'."
    return Section(note=note)


def _quality(report: Mapping[str, Any]) -> Section:
    quality = report["quality"]
    header = [column.replace("+-", "±") or "mode" for column in QUALITY_COLUMNS]
    caption = (
        f"{quality['tokens']:,} tokens scored; ± is the standard error. KL divergence and the share of "
        "tokens with the same best next one are against dense."
    )
    note = "Quality guard passed." if quality["guard"] == "passed" else ""
    table = Table(header, quality_rows(quality), caption)
    return Section("Quality", guard_warning(quality) or "", note, tables=[table])


def _speed(report: Mapping[str, Any]) -> Section:
    speed, executor, decode = report["speed"], report["executor"], report["decode"]
    simulated = ", one of them emulated" if executor["simulated"] else ""
    note = (
        f"Behind a prompt of {speed['prompt_tokens']} tokens, which is read at "
        f"{speed['prefill_tokens_per_s']:,.0f} tokens/s; first token after "
        f"{1e3 * speed['first_token_s']:.1f} ms. The text at the end was written by {executor['kind']} on "
        f"{', '.join(executor['devices'])}{simulated}."
    )
    rates = [_form("{:,.1f}", speed[f"{mode}_tokens_per_s"]) for mode in MODES]
    tables = [Table(("mode", *MODES), [["tokens/s, batch 1", *rates]])]
    if decode:
        rows = [["predictors, ms", f"{1e3 * decode['predictor_s']:.3f}"]]
        rows.append(["FFNs, ms", f"{1e3 * decode['ffn_s']:.3f}"])
        rows += [[f"rows {n}", f"{decode[f'rows_{n}']:,.1f}"] for n in ("predicted", "computed", "active")]
        rows.append(["read, MB", f"{decode['bytes_per_token'] / 1e6:,.2f}"])
        neurons = sum(report["model"]["neurons"])
        caption = f"Sums over all layers, which have {neurons:,} rows, one a neuron."
        tables.append(Table(("a token in mode predicted", "mean"), rows, caption))
    return Section("Speed", note=note, tables=tables)


def _activations(report: Mapping[str, Any]) -> Section:
    profile = report["profile"]
    counted = _form("{:,} tokens", profile["tokens"])
    note = (
        f"{counted}, {profile['source']}. {profile['hot_share_80']:.1%} of the neurons make 80% of the "
        f"activations; {_form('{:.1%}', profile['density_mean'])} of them are active for a token."
    )
    return Section("Activations", note=note, pictures=["density", "activations_per_layer", "activations"])


_PREDICTOR_SHARES = {
    "active": "true_density",
    "marked": "density",
    "recall": "recall",
    "recall by contribution": "contribution_recall",
    "precision": "precision",
}
"""Columns of the predictors' table, by their keys in the report."""


def _predictors(report: Mapping[str, Any]) -> Section:
    predictor = report["predictor"]
    weights = f" in {predictor['dtype']}" if predictor["dtype"] else ""
    note = (
        f"Predictors of kind {predictor['kind']}{weights}, {predictor['source']}: "
        f"{predictor['bytes'] / 1e6:,.2f} MB, {predictor['bytes'] / report['model']['bytes']:.1%} of the "
        f"model's. Means over all layers: recall {predictor['recall_mean']:.1%} "
        f"({predictor['contribution_recall_mean']:.1%} by contribution), precision "
        f"{predictor['precision_mean']:.1%}, marked {predictor['density_mean']:.1%}."
    )
    rows = []
    errors = report["quality"]["modes"]["predicted"]["layer_error"]
    for index, (layer, error) in enumerate(zip(predictor["per_layer"], errors, strict=True)):
        shares = [f"{layer[key]:.1%}" for key in _PREDICTOR_SHARES.values()]
        threshold = f"{layer['threshold']:.2f}" if layer["kind"] != "none" else "-"
        cells = [*shares, threshold, f"{layer['bytes']:,}", f"{error:.2%}"]
        rows.append([str(index), layer["kind"], f"{layer['rank'] or '-'}", *cells])
    header = ("layer", "kind", "rank", *_PREDICTOR_SHARES, "threshold", "bytes", "output error")
    caption = ""
    if any(layer["kind"] == "none" for layer in predictor["per_layer"]):
        caption = "A layer of kind none has no predictor: every neuron is marked, as in mode exact."
    pictures = ["recall", "marked", "bytes", "errors"]
    return Section("Predictors", note=note, pictures=pictures, tables=[Table(header, rows, caption)])


def _placement(report: Mapping[str, Any]) -> Section:
    placement, share = report["placement"], report["executor"]["neuron_load_share"]
    hot, neurons = sum(placement["hot_neurons"]), sum(report["model"]["neurons"])
    note = (
        f"Placement {placement['source']} for {placement['goal']}, {placement['status']}: {hot:,} of "
        f"{neurons:,} neurons are hot and serve {_form('{:.1%}', share)} of the activations; "
        f"{placement['device_bytes'] / 2**20:,.1f} of {placement['budget_bytes'] / 2**20:,.1f} MiB used. "
        f"{placement_gain(placement)}."
    )
    header = ("layer", "hot", "neurons", "activations", "device, us", "host, us", "no more because of")
    caption = "Activations: what share of them the hot neurons serve."
    tables = [Table(header, placement_rows(placement), caption)]
    return Section("Hot and cold", note=note, pictures=["placement"], tables=tables)
