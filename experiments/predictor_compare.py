"""Are ranks that fit each layer worth it (PowerInfer, section 5.1), and what do signs find untrained?

    python -m experiments.predictor_compare [--quick]

On the demo model, all at the same recall by count: fixed ranks, ranks by cost, and signs. Bytes a token are
those of the predictors and of the openers (gate rows) of the neurons that they mark; rows of the truly active
neurons cost the same for all. Expect 6 minutes on two cores.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import app, flags

from pjax.base import Predictors
from pjax.executor import OneProgram
from pjax.formats import load_tokenizer
from pjax.hardware import hardware_preset
from pjax.model import Decoder
from pjax.pipeline import encode_text, profile_rows
from pjax.quality import chunks, measure_quality, mode_ways
from pjax.speed import measure_ffn, measure_speed
from pjax.storage import load_model
from pjax.training.train import layer_costs, train_predictors

_RECALL = flags.DEFINE_float("recall", 0.95, "Share of the active neurons to mark.")
_RANKS = flags.DEFINE_multi_integer("rank", [32, 64, 128], "Fixed ranks to compare with.")
_TOKENS = flags.DEFINE_integer("tokens", 131072, "Of the calibration text.", lower_bound=4096)
_QUICK = flags.DEFINE_bool("quick", False, "8,192 tokens and one fixed rank, to see that it runs.")

DEMO = Path(__file__).parents[1] / "configs" / "demo"

COLUMNS = (
    "predictors", "ranks", "recall", "by contribution", "density", "x true", "of model bytes", "bytes/token",
    "perplexity", "predictors us", "us/token", "training s",
)  # fmt: skip


class Made(NamedTuple):
    """Predictors to compare, with the seconds that they took."""

    name: str
    predictors: Predictors
    seconds: float


def make(model: Decoder, rows: np.ndarray, ranks: list[int]) -> Iterator[Made]:
    """All kinds, on the same text."""
    kinds: dict[str, dict] = {f"rank {rank}": {"rank": rank} for rank in ranks}
    kinds |= {"ranks by cost": {}, "signs": {"kind": "sign"}}
    for name, how in kinds.items():
        start = time.perf_counter()
        predictors = train_predictors(
            model,
            rows,
            recall=_RECALL.value,
            every_layer=True,
            hardware=hardware_preset("demo"),
            say_fn=lambda line: print(line, file=sys.stderr),
            **how,
        )
        yield Made(name, predictors, time.perf_counter() - start)


def line(made: Made, model: Decoder, evaluation: np.ndarray, prompt: np.ndarray, model_bytes: int) -> str:
    """A row of the table."""
    reports = made.predictors.reports
    mean = {
        field: statistics.fmean(getattr(report, field) for report in reports)
        for field in ("recall", "contribution_recall", "density", "true_density")
    }
    read = sum(
        report.bytes + report.density * cost.neurons * cost.opener_bytes
        for report, cost in zip(reports, layer_costs(model, None), strict=True)
    )
    ways = mode_ways(model, ("dense", "predicted"), made.predictors)
    rise = measure_quality(model, evaluation, ways).modes["predicted"].rise
    speed = measure_speed(
        {"predicted": OneProgram(model, mode="predicted", predictors=made.predictors)}, prompt
    )
    cells = (
        made.name,
        " ".join(str(report.rank) for report in reports) if reports[0].rank else "-",
        f"{mean['recall']:.1%}",
        f"{mean['contribution_recall']:.1%}",
        f"{mean['density']:.1%}",
        f"{mean['density'] / mean['true_density']:.2f}",
        f"{sum(report.bytes for report in reports) / model_bytes:.1%}",
        f"{read:,.0f}",
        f"{rise:+.2%}",
        f"{1e6 * measure_ffn(model, made.predictors, prompt).predictor_s:.0f}",
        f"{1e6 / speed.tokens_per_s['predicted']:.0f}",
        f"{made.seconds:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def main(argv):
    """Trains, measures and prints."""
    del argv
    tokens, ranks = (8192, [32]) if _QUICK.value else (_TOKENS.value, _RANKS.value)
    model, tokenizer = load_model(DEMO), load_tokenizer(DEMO)
    rows = profile_rows(encode_text(tokenizer, "stdlib:calibration", tokens), model.config.context)
    ids = encode_text(tokenizer, str(DEMO / "evaluation.txt"), 2048 if _QUICK.value else 16384)
    evaluation = chunks(ids, model.config.context, model.config.bos_id)
    model_bytes = sum(file.stat().st_size for file in DEMO.glob("*.safetensors"))
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for made in make(model, rows, ranks):
        print(line(made, model, evaluation, ids[:64], model_bytes), flush=True)


if __name__ == "__main__":
    app.run(main)
