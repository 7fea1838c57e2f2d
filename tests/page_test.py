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
    shares = ["10.0%", "20.0%", "90.0%", "95.0%", "80.0%"]
    assert ["1", "lowrank", "3", *shares, "0.50", "101", "50.00%"] in shown.rows
    assert ["1", "2", "6", "75.0%", "294000000.0", "98000000.0", "minimum"] in shown.rows
    assert "10 tokens, measured" in shown.text and "recall 90.0% (95.0% by contribution)" in shown.text
    assert "5.0% above that of dense" in shown.text and "Worst layers" in shown.text and "x < y" in shown.text
    assert "40.0% of the neurons make 80% of the activations" in shown.text


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


def test_page_of_a_model_without_zeros():
    values = page_report() | {"profile": None, "predictor": None, "placement": None, "decode": None}
    values["quality"] = record.quality_part(Quality({"dense": DENSE}, 64), {}, QualitySettings())
    values["speed"] = record.speed_part(Speed({"dense": 1000.0}, 500.0, 0.125, {}, 64))
    shown = Page(page.report_page(values, None))
    assert ["tokens/s, batch 1", "1,000.0", "-", "-"] in shown.rows and shown.images == {}
    assert "Predictors" not in shown.text and "guard" not in shown.text


def test_page_of_a_layer_without_a_predictor(monkeypatch):
    monkeypatch.setattr(page, "can_draw", lambda: False)  # only the tables are looked at
    values = page_report()
    shown = Page(page.report_page(values, STATS))
    assert "kind none" not in shown.text
    layers = values["predictor"]["per_layer"]
    layers[0] |= {"rank": 0, "recall": 1.0, "precision": 0.1, "density": 1.0, "bytes": 0, "kind": "none"}
    layers[0] |= {"contribution_recall": 1.0, "threshold": -16.0}
    shown = Page(page.report_page(values, STATS))
    shares = ["10.0%", "100.0%", "100.0%", "100.0%", "10.0%"]
    assert ["0", "none", "-", *shares, "-", "0", "25.00%"] in shown.rows and "kind none" in shown.text


@needs_matplotlib
def test_pictures_show_the_numbers():
    values = page_report()
    values["predictor"]["per_layer"][0] |= {"kind": "none", "density": 1.0}
    figures = pictures.draw_all(values, STATS)
    assert set(figures) == set(page.CAPTIONS)
    bars = [bar.get_height() for bar in figures["density"].axes[0].patches]
    assert bars == pytest.approx([25.0, 100 * 20 / 60])
    x, y = figures["activations_per_layer"].axes[0].lines[0].get_data()
    assert list(x) == [0, 25, 50, 75, 100]
    np.testing.assert_allclose(y, [0, 80, 90, 100, 100])
    whole = figures["activations"].axes[0]
    x, y = whole.lines[0].get_data()
    np.testing.assert_allclose(y, 100 * np.cumsum([0, 10, 8, 5, 5, 1, 1, 0, 0, 0, 0]) / 30)
    assert whole.lines[1].get_xdata()[1] == 40.0  # four of ten neurons make 28 of 30 activations
    lines = {line.get_label(): list(line.get_ydata()) for line in figures["recall"].axes[0].lines}
    nan = pytest.approx(np.nan, nan_ok=True)
    assert lines == {"recall": [nan, 90.0], "by contribution": [nan, 95.0], "precision": [nan, 80.0]}
    bars = [bar.get_height() for bar in figures["marked"].axes[0].patches]
    assert bars == [nan, 20.0, 10.0, 10.0]
    assert figures["bytes"].axes[0].patches[1].get_height() == pytest.approx(101 / 1024)
    assert figures["errors"].axes[0].patches[1].get_height() == pytest.approx(50.0)
    bars = [[bar.get_height() for bar in axes.patches] for axes in figures["placement"].axes]
    np.testing.assert_allclose(bars[0], [100 * 2 / 4, 100 * 2 / 6, 80.0, 75.0])
    np.testing.assert_allclose(bars[1], [156.8e6, 294e6, 39.2e6, 98e6])


@needs_matplotlib
@pytest.mark.parametrize("num_layers", [1, 40])
def test_pictures_have_units_and_nothing_covers_anything(num_layers):
    values = page_report()
    values["predictor"]["per_layer"] = [values["predictor"]["per_layer"][1]] * num_layers
    values["placement"]["per_layer"] = [values["placement"]["per_layer"][1]] * num_layers
    values["profile"]["density_per_layer"] = [0.9] * num_layers
    stats = ActivationStats((STATS.counts[1],) * num_layers, 10)
    for figure in pictures.draw_all(values, stats).values():
        pictures.to_svg(figure)  # gives everything its place
        for axes in figure.axes:
            assert axes.get_ylabel() == "layer" or axes.get_ylabel().endswith((", %", ", KiB", ", us"))
            if axes.get_xlabel() == "layer":
                assert {t for t in axes.get_xticks() if -0.6 < t < num_layers - 0.4} <= set(range(num_layers))
            legend, (x0, x1) = axes.get_legend(), figure.bbox.intervalx
            if legend:
                box = legend.get_window_extent()
                assert box.y0 >= axes.bbox.y1 and x0 <= box.x0 and box.x1 <= x1


@needs_matplotlib
def test_activations_of_layers_that_were_never_active():
    drawn = (pictures.draw_activations, pictures.draw_activations_per_layer)
    silent = ActivationStats((np.zeros(4, int), np.zeros(6, int)), 10)
    assert all(pictures.to_svg(draw(silent)).startswith("<svg") for draw in drawn)
