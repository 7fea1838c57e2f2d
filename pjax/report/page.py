"""`report.html`: a report as one file that opens offline, with tables, and pictures where matplotlib is."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from pjax.base import MODES, VERSION, ActivationStats
from pjax.report.pictures import can_draw, draw_all, to_svg
from pjax.report.tables import QUALITY_COLUMNS, quality_rows

CAPTIONS = {
    "errors": "How far the predicted FFN's output is from the dense one's, on the same input.",
    "density": "How many neurons of each layer are active for a token.",
    "activations": "Which share of the neurons makes which share of the activations (Fig. 4 of the paper).",
    "predictors": "Each layer's predictor on held-out tokens: recall and precision; neurons that it marks "
    "beside those that are active; its size.",
    "placement": "What each layer has on the device, and how long device and host are expected to take.",
}
"""What each picture shows."""

_TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}: pjax report</title>
<style>
body { font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.4; }
table { border-collapse: collapse; margin: 1rem 0; }
caption { text-align: left; color: #555; caption-side: bottom; padding-top: .3rem; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; }
figcaption { color: #555; }
.warning { color: #b00020; font-weight: bold; }
.scroll { overflow-x: auto; }
pre { background: #f4f4f4; padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{%- for section in sections %}
{% if section.title %}<h2>{{ section.title }}</h2>{% endif %}
{%- if section.warning %}
<p class="warning">{{ section.warning }}</p>
{%- endif %}
{%- if section.note %}
<p>{{ section.note }}</p>
{%- endif %}
{%- for table in section.tables %}
<div class="scroll"><table>
{%- if table.caption %}
<caption>{{ table.caption }}</caption>
{%- endif %}
<tr>{% for cell in table.header %}<th>{{ cell }}</th>{% endfor %}</tr>
{%- for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</table></div>
{%- endfor %}
{%- for name in section.pictures if name in pictures %}
<figure><img alt="{{ captions[name] }}" src="data:image/svg+xml;base64,{{ pictures[name] }}">
<figcaption>{{ captions[name] }}</figcaption></figure>
{%- endfor %}
{%- if section.text %}
<pre>{{ section.text }}</pre>
{%- endif %}
{%- endfor %}
</body>
</html>
"""


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
    tables: Sequence[Table] = ()
    pictures: Sequence[str] = ()
    text: str = ""


def report_page(report: Mapping[str, Any], stats: ActivationStats | None) -> str:
    """The whole page; every text in it is escaped.

    Args:
        report: the report, see `report`.
        stats: how often each neuron is active, for the pictures; None for a model without zeros.
    """
    sections = [_head(report), _quality(report), _speed(report)]
    if report["predictor"] and report["placement"]:
        sections += [_activations(report), _predictors(report), _placement(report), _layers(report)]
    sections.append(Section("Text", text=report["text"]))
    figures = draw_all(report, stats) if can_draw() else {}
    # As images, not as elements of the page, the pictures keep their ids and styles to themselves.
    pictures = {name: base64.b64encode(to_svg(f).encode()).decode() for name, f in figures.items()}
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_TEMPLATE)
    return template.render(
        title=report["model"]["name"], sections=sections, pictures=pictures, captions=CAPTIONS
    )


def _form(form: str, value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(scale * value)


def _head(report: Mapping[str, Any]) -> Section:
    model, hardware = report["model"], report["hardware"]
    note = (
        f"{model['family']}, {model['layers']} layers, {model['parameters']:,} parameters in "
        f"{model['bytes'] / 1e6:,.1f} MB; hardware {hardware['name']} ({hardware['source']}); pjax {VERSION}."
    )
    if not can_draw():
        note += " Without pictures, as matplotlib is not installed: pip install 'pjax[plots]'."
    return Section(note=note)


def _quality(report: Mapping[str, Any]) -> Section:
    quality = report["quality"]
    caption = f"{quality['tokens']:,} tokens scored; +- is the standard error."
    table = Table(QUALITY_COLUMNS, quality_rows(quality), caption)
    warning = ""
    if quality["guard"] == "failed":
        warning = f"Quality guard failed, mode=None falls back to exact: {'; '.join(quality['faults'])}."
    note = "Quality guard passed." if quality["guard"] == "passed" else ""
    return Section("Quality", warning, note, [table], ["errors"])


def _speed(report: Mapping[str, Any]) -> Section:
    speed, executor, decode = report["speed"], report["executor"], report["decode"]
    simulated = ", simulated" if executor["simulated"] else ""
    caption = (
        f"Behind a prompt of {speed['prompt_tokens']} tokens, which is read at "
        f"{speed['prefill_tokens_per_s']:,.0f} tokens/s; first token after "
        f"{1e3 * speed['first_token_s']:.1f} ms. The text below: {executor['kind']} on "
        f"{', '.join(executor['devices'])}{simulated}."
    )
    rates = [_form("{:,.1f}", speed[f"{mode}_tokens_per_s"]) for mode in MODES]
    tables = [Table(("", *MODES), [["tokens/s, batch 1", *rates]], caption)]
    if decode:
        rows = [["predictors, ms", f"{1e3 * decode['predictor_s']:.3f}"]]
        rows.append(["FFNs, ms", f"{1e3 * decode['ffn_s']:.3f}"])
        rows += [[f"rows {n}", f"{decode[f'rows_{n}']:,.1f}"] for n in ("predicted", "computed", "active")]
        rows.append(["read, MB", f"{decode['bytes_per_token'] / 1e6:,.2f}"])
        neurons = sum(report["model"]["neurons"])
        tables.append(Table(("a token in mode predicted", ""), rows, f"The model has {neurons:,} rows."))
    return Section("Speed", tables=tables)


def _activations(report: Mapping[str, Any]) -> Section:
    profile = report["profile"]
    note = (
        f"{_form('{:,}', profile['tokens'])} tokens, {profile['source']}; "
        f"{profile['hot_share_80']:.1%} of the neurons make 80 % of the activations; "
        f"{_form('{:.1f}', profile['density_mean'], 100)} % of them are active for a token."
    )
    return Section("Activations", note=note, pictures=["density", "activations"])


def _predictors(report: Mapping[str, Any]) -> Section:
    predictor = report["predictor"]
    note = (
        f"{predictor['kind']}, {predictor['dtype']}, {predictor['source']}; "
        f"{predictor['bytes'] / 1e6:,.2f} MB, {predictor['bytes'] / report['model']['bytes']:.1%} of the "
        f"model's. Means over all layers: recall {predictor['recall_mean']:.1%}, precision "
        f"{predictor['precision_mean']:.1%}, marked {predictor['density_mean']:.1%}."
    )
    return Section("Predictors", note=note, pictures=["predictors"])


def _placement(report: Mapping[str, Any]) -> Section:
    placement, share = report["placement"], report["executor"]["neuron_load_share"]
    hot, neurons = sum(placement["hot_neurons"]), sum(report["model"]["neurons"])
    note = (
        f"{placement['source']}, {placement['status']}, by {placement['goal']}: {hot:,} of {neurons:,} "
        f"neurons are hot and serve {_form('{:.1f}', share, 100)} % of the activations; "
        f"{placement['device_bytes'] / 2**20:,.1f} of {placement['budget_bytes'] / 2**20:,.1f} MiB used."
    )
    return Section("Hot and cold", note=note, pictures=["placement"])


_PREDICTOR_CELLS = {
    "active": ("true_density", "{:.1%}"),
    "marked": ("density", "{:.1%}"),
    "recall": ("recall", "{:.1%}"),
    "precision": ("precision", "{:.1%}"),
    "rank": ("rank", "{:,}"),
    "threshold": ("threshold", "{:.3g}"),
    "bytes": ("bytes", "{:,}"),
}


def _layers(report: Mapping[str, Any]) -> Section:
    header = [
        "layer",
        "neurons",
        *_PREDICTOR_CELLS,
        "error",
        "hot",
        "of activations",
        "no more hot because of",
    ]
    errors = report["quality"]["modes"]["predicted"]["layer_error"]
    parts = zip(report["predictor"]["per_layer"], report["placement"]["per_layer"], errors, strict=True)
    rows = []
    for index, (predictor, placed, error) in enumerate(parts):
        # A layer that no predictor pays for has none.
        found = [
            "-" if predictor is None else f.format(predictor[key]) for key, f in _PREDICTOR_CELLS.values()
        ]
        own = [f"{error:.2%}", f"{placed['hot']:,}", f"{placed['share']:.1%}", placed["limit"] or "-"]
        rows.append([str(index), f"{placed['neurons']:,}", *found, *own])
    return Section("Layers", tables=[Table(header, rows)])
