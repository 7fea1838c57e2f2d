"""The shipped model is what the README says: small, sparse, honest text apart, and reproducible."""

from pathlib import Path

import numpy as np

import pjax
from pjax.formats import read_texts

DEMO = Path(__file__).parents[1] / "configs" / "demo"


def test_it_is_small_and_sparse():
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 16e6
    model, tokenizer = pjax.load_model(DEMO), pjax.load_tokenizer(DEMO)
    ids = np.asarray(tokenizer.encode((DEMO / "evaluation.txt").read_text())[:4096]).reshape(8, 512)
    stats = pjax.collect_stats(model, ids)
    assert np.mean(stats.density_per_layer) <= 0.15


def test_evaluation_text_is_neither_trained_nor_calibrated_on():
    evaluation = (DEMO / "evaluation.txt").read_text()
    assert 150_000 < len(evaluation) < 250_000
    pieces = [evaluation[start : start + 200] for start in range(0, len(evaluation) - 200, 5000)]
    for corpus in ("stdlib:training", "stdlib:calibration"):
        text = "".join(read_texts(corpus))
        assert not [piece for piece in pieces if piece in text]
