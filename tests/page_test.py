"""report.html against the report that it shows: every figure, every picture, and nothing from elsewhere."""

import base64
import html.parser
import sys
import xml.etree.ElementTree

import numpy as np
import pytest

from pjax.base import ActivationStats
from pjax.quality import Quality
from pjax.report import page, pictures, record
from pjax.settings import QualitySettings
from pjax.speed import Speed
from tests.report_test import DENSE, ERRORS, PREDICTED, STATS, sparse_report

needs_matplotlib = pytest.mark.skipif(not pictures.can_draw(), reason="matplotlib is not installed")


def page_report(**changes) -> dict:
    """A report with all that a page shows."""
    modes = {"dense": DENSE, "exact": DENSE, "predicted": PREDICTED}
    speed = Speed({"dense": 1000.0, "exact": 2000.0, "predicted": 3000.5}, 500.0, 0.125, {}, 64)
    return sparse_report() | {
        "quality": record.quality_part(Quality(modes, 64), ERRORS, QualitySettings()),
        "speed": record.speed_part(speed),
        "executor": {
            "kind": "one program", "devices": ["cpu:0"], "simulated": False, "neuron_load_share": 23 / 30
        },
        "decode": {
            "predictor_s": 1.5e-3, "ffn_s": 2.5e-4, "rows_predicted": 1234.4, "rows_computed": 60.0,
            "rows_active": 59.6, "bytes_per_token": 7_250_000,
        },
        "text": "x < y",
    } | changes  # fmt: skip


class Page(html.parser.HTMLParser):
    """The text of a page's cells by row, its images, and every tag and address in it."""

    def __init__(self, text: str):
        super().__init__()
        self.rows, self.tags, self.links, self.images, self.text = [], [], [], {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.links += [values[name] for name in ("src", "href") if name in values]
        if tag == "tr":
            self.rows.append([])
        if tag == "img":
            self.images[values["alt"]] = base64.b64decode(values["src"].split(",")[1]).decode()

    def handle_data(self, data):
        self.text += data
        if self.tags and self.tags[-1] in ("td", "th") and data.strip():
            self.rows[-1].append(data.strip())

    def handle_endtag(self, tag):
        self.tags.append("/" + tag)


def test_page_has_every_figure_of_the_report():
    shown = Page(page.report_page(page_report(), STATS))
    assert ["predicted", "21.0000", "0.5000", "5.000%", "1.000%", "0.125000", "75.00%"] in shown.rows
    assert ["tokens/s, batch 1", "1,000.0", "2,000.0", "3,000.5"] in shown.rows
    assert ["rows predicted", "1,234.4"] in shown.rows and ["predictors, ms", "1.500"] in shown.rows
    layer = next(row for row in shown.rows if row[:2] == ["1", "6"])
    assert layer[2:] == [
        "10.0%",
        "20.0%",
        "90.0%",
        "80.0%",
        "3",
        "0.5",
        "101",
        "50.00%",
        "2",
        "75.0%",
        "minimum",
    ]
    assert "5.0% above that of dense" in shown.text and "x < y" in shown.text
    assert "40.0% of the neurons make 80 % of the activations" in shown.text


def test_page_opens_offline_and_escapes_every_text():
    values = page_report(text="<script>alert(1)</script>")
    values["model"] |= {"name": "<b>&$a_b$", "family": "<i>"}
    values["hardware"] = {"name": "</style>", "source": '"<u>'}
    values["predictor"] |= {"source": "<em>"}
    text = page.report_page(values, STATS)
    shown = Page(text)
    assert not {"script", "b", "i", "u", "em", "link"} & set(shown.tags)
    assert "<b>&$a_b$" in shown.text and "<script>alert(1)</script>" in shown.text
    assert all(link.startswith("data:image/svg+xml;base64,") for link in shown.links)
    assert "url(http" not in text and "@import" not in text


@needs_matplotlib
def test_page_has_every_picture_twice_the_same():
    text = page.report_page(page_report(), STATS)
    images = Page(text).images
    assert set(images) == set(page.CAPTIONS.values())
    for svg in images.values():
        assert xml.etree.ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert page.report_page(page_report(), STATS) == text


def test_page_without_matplotlib_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = Page(page.report_page(page_report(), STATS))
    assert shown.images == {} and "pip install 'pjax[plots]'" in shown.text
    assert ["tokens/s, batch 1", "1,000.0", "2,000.0", "3,000.5"] in shown.rows


def test_page_of_a_model_without_zeros_and_of_a_layer_without_a_predictor():
    values = page_report() | {"profile": None, "predictor": None, "placement": None, "decode": None}
    values["quality"] = record.quality_part(Quality({"dense": DENSE}, 64), {}, QualitySettings())
    values["speed"] = record.speed_part(Speed({"dense": 1000.0}, 500.0, 0.125, {}, 64))
    shown = Page(page.report_page(values, None))
    assert ["tokens/s, batch 1", "1,000.0", "-", "-"] in shown.rows and shown.images == {}
    assert "Predictors" not in shown.text and "guard" not in shown.text
    values = page_report()
    values["predictor"]["per_layer"][0] = None
    shown = Page(page.report_page(values, STATS))
    assert next(row for row in shown.rows if row[:2] == ["0", "4"])[2:9] == ["-"] * 7


@needs_matplotlib
def test_pictures_show_the_numbers():
    figures = pictures.draw_all(page_report(), STATS)
    assert list(figures) == ["density", "activations", "predictors", "errors", "placement"]
    bars = [bar.get_height() for bar in figures["density"].axes[0].patches]
    assert bars == pytest.approx([25.0, 100 * 20 / 60])
    each, whole = figures["activations"].axes[:2]
    x, y = each.lines[0].get_data()
    assert list(x) == [0, 25, 50, 75, 100]
    np.testing.assert_allclose(y, [0, 80, 90, 100, 100])
    x, y = whole.lines[0].get_data()
    np.testing.assert_allclose(y, 100 * np.cumsum([0, 10, 8, 5, 5, 1, 1, 0, 0, 0, 0]) / 30)
    assert whole.lines[1].get_xdata()[1] == 40.0  # four of ten neurons make 28 of 30 activations
    for figure in figures.values():
        panels = [axes for axes in figure.axes if axes.get_ylabel() != "layer"]
        assert all(axes.get_ylabel() for axes in panels) and panels[-1].get_xlabel()
    assert figures["errors"].axes[0].patches[1].get_height() == pytest.approx(50.0)


@needs_matplotlib
def test_activations_of_layers_that_were_never_active():
    silent = ActivationStats((np.zeros(4, int), np.zeros(6, int)), 10)
    assert pictures.to_svg(pictures.draw_activations(silent)).startswith("<svg")
