"""The nouns of pjax: frozen records that cross module borders, callable types, and the axes.

Axes, as written in every docstring: `batch`, `seq` (query tokens), `kv_seq` (cache capacity),
`model` (residual width), `neurons` (FFN rows of a layer; neurons = hot + cold), `hot`, `cold`,
`rank` (predictor), `layers`, `heads`, `kv_heads`, `head_dim`, `vocab`, `group` (neurons the solver
decides together).

A neuron is *active* for a token when the value that multiplies its down row is not zero. A neuron
is *hot* when the placement puts it on the device, else *cold*.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import numpy as np

from pjax.model_config import ModelConfig
from pjax.weights import Matrix, PackedMatrix

VERSION = "0.1.0"
"""Of pjax; artefacts made by another version are made again."""

Mode = Literal["dense", "exact", "predicted"]
"""Which neurons an FFN computes: all; those its own gate opens; those the predictor marks first."""

MODES: tuple[Mode, ...] = get_args(Mode)
"""All of them, from most to least computed."""


class FfnCounts(NamedTuple):
    """How many neurons one `sparse_ffn` call predicted, computed and found active.

    Attributes:
        predicted: int32 [batch], neurons let through by the mask (all of them without a mask).
        computed: int32 [batch], neurons whose down row was read.
        active: int32 [batch], neurons whose value was not zero.
    """

    predicted: jax.Array
    computed: jax.Array
    active: jax.Array


@dataclasses.dataclass(frozen=True)
class ActivationStats:
    """How often each neuron was active.

    Attributes:
        counts: int64 [neurons] per layer, tokens for which the neuron was active.
        num_tokens: tokens counted.
        num_tokens_known: False if that is only the least that it can be, since whoever counted does not say;
            frequencies are then the most that they can be, right only in relation to each other.
    """

    counts: tuple[np.ndarray, ...]
    num_tokens: int
    num_tokens_known: bool = True

    @property
    def frequencies(self) -> tuple[np.ndarray, ...]:
        """float64 [neurons] per layer, activation frequency in 0..1."""
        return tuple(c / max(self.num_tokens, 1) for c in self.counts)

    @property
    def density_per_layer(self) -> tuple[float, ...]:
        """Mean share of active neurons, one entry a layer."""
        return tuple(float(f.mean()) if f.size else 0.0 for f in self.frequencies)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRankPredictor:
    """Guesses a layer's active neurons: `relu(x @ first.T) @ second.T + bias > threshold`.

    Attributes:
        first: [rank, model], of any weight type.
        second: [neurons, rank], of the same type.
        bias: [neurons].
        threshold: float32 scalar, the score above which a neuron counts as active.
        input: "normed" (the FFN input) or "residual" (what it was made from).
    """

    first: Matrix
    second: Matrix
    bias: jax.Array
    threshold: jax.Array
    input: str = dataclasses.field(default="normed", metadata={"static": True})

    @property
    def dtype(self) -> str:
        """The weight type of the matrices."""
        return self.first.format if isinstance(self.first, PackedMatrix) else str(self.first.dtype)

    @property
    def kind(self) -> str:
        """As of `PredictorReport`."""
        return "lowrank"

    @property
    def rank(self) -> int:
        """Width of the hidden layer."""
        return self.first.shape[0]

    @property
    def nbytes(self) -> int:
        """Of the weights that each token reads."""
        return self.first.nbytes + self.second.nbytes + self.bias.nbytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SignPredictor:
    """Guesses a layer's active neurons: `slope * (agreeing - disagreeing signs) + bias > threshold`.

    The signs are those of x and of each neuron's opener, its gate row, or its up row without a gate.

    Attributes:
        bits: uint32 [neurons, ceil(model / 32)], the openers' signs, see `ops.pack_signs`.
        slope: float32 scalar, what one sign weighs, in log-odds.
        bias: float32 [neurons].
        threshold, input: as of `LowRankPredictor`.
    """

    bits: jax.Array
    slope: jax.Array
    bias: jax.Array
    threshold: jax.Array
    input: str = dataclasses.field(default="normed", metadata={"static": True})

    @property
    def dtype(self) -> str:
        """The weight type."""
        return "sign"

    @property
    def kind(self) -> str:
        """As of `PredictorReport`."""
        return "sign"

    @property
    def rank(self) -> int:
        """It has no hidden layer."""
        return 0

    @property
    def nbytes(self) -> int:
        """Of the weights that each token reads."""
        return self.bits.nbytes + self.bias.nbytes


Predictor = LowRankPredictor | SignPredictor
"""Guesses a layer's active neurons; `predictor.predict_scores` and `predict_mask` apply any kind."""


class PredictorReport(NamedTuple):
    """One layer's predictor on held-out tokens; without one every neuron counts as marked.

    Attributes:
        rank: width of its hidden layer; 0 of those that have none.
        recall: share of the active neurons that it marks, 0..1.
        precision: share of the marked neurons that are active, 0..1.
        density: share of neurons that it marks, 0..1.
        true_density: share of neurons that are active, 0..1.
        threshold: score above which a neuron is marked.
        bytes: of its weights.
        contribution_recall: recall, each neuron counted by how much it moves the output, |value| times the
            norm of its down row.
        kind: "lowrank", "sign" or "none".
    """

    rank: int
    recall: float
    precision: float
    density: float
    true_density: float
    threshold: float
    bytes: int
    contribution_recall: float
    kind: str


class ScoreHistogram(NamedTuple):
    """How the scores of one layer's neurons are spread on held-out tokens: any threshold's figures.

    Attributes:
        counts: int64 [2, bins], of inactive, then of active neurons with a score in each bin.
        contributions: float64 [bins], sum of what the active ones of each bin contribute, see
            `PredictorReport`.
    """

    counts: np.ndarray
    contributions: np.ndarray


@dataclasses.dataclass(frozen=True)
class Predictors:
    """The predictors of a model, one a layer, with how well each does.

    Attributes:
        layers: one predictor a layer; None where none pays, so that the layer runs as in mode "exact".
        reports: one report a layer; none if they were never measured.
        histograms: one a layer, from which `thresholds.set_recall` sets other thresholds without training;
            none if they were never measured.
    """

    layers: tuple[Predictor | None, ...]
    reports: tuple[PredictorReport, ...]
    histograms: tuple[ScoreHistogram, ...] = ()


@dataclasses.dataclass(frozen=True)
class HardwareSpec:
    """Speeds and sizes of a device and its host.

    Attributes:
        name: for people.
        source: "measured" on this machine, "preset" from published figures, or "simulated".
        device_bytes: memory of the device.
        host_bytes: memory of the host.
        device_bytes_per_s: streaming bandwidth of the device memory.
        host_bytes_per_s: streaming bandwidth of the host memory.
        host_gather_bytes_per_s: bandwidth of the host when it reads scattered rows.
        launch_s: cost of starting one program on the device.
        sync_s: cost of joining the partial results of device and host once.
    """

    name: str
    source: Literal["measured", "preset", "simulated"]
    device_bytes: int
    host_bytes: int
    device_bytes_per_s: float
    host_bytes_per_s: float
    host_gather_bytes_per_s: float
    launch_s: float
    sync_s: float


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which neurons live on the device.

    Attributes:
        hot_mask: bool [neurons] per layer.
        status: "optimal", "feasible" (time limit hit, with a solution), "greedy" (the fallback) or
            "imported" (chosen elsewhere).
        objective: of goal "impact", activation frequency served by the device, summed over the hot neurons;
            of "latency", expected seconds of all FFNs in a decode step.
        bound: proven bound of the objective, from above for "impact", from below for "latency"; of an
            imported placement, with as many hot neurons in each layer.
        device_bytes: bytes of the hot neurons.
        budget_bytes: bytes that were allowed.
        solve_s: wall time of the solver.
        goal: what the objective is.
        limits: for each layer what keeps further neurons cold: "budget", "minimum" (as many as would pay for
            a join do not fit, or are not there), "no gain", or "all hot" if there is none; empty if imported.
        next_gib: what one more GiB of device memory would better the objective by.
    """

    hot_mask: tuple[np.ndarray, ...]
    status: Literal["optimal", "feasible", "greedy", "imported"]
    objective: float
    bound: float
    device_bytes: int
    budget_bytes: int
    solve_s: float
    goal: Literal["impact", "latency"] = "impact"
    limits: tuple[str, ...] = ()
    next_gib: float = 0.0

    @property
    def gap(self) -> float:
        """By how much objective and bound differ, as a share of the larger one; 0 is proven best."""
        return abs(self.bound - self.objective) / max(abs(self.objective), abs(self.bound), 1e-300)


AnyArray = jax.Array | np.ndarray
"""An array on a device or still in numpy."""

FfnFn = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""`ffn_fn(layer, x, residual) -> (y, aux)`: runs one layer's FFN.

`layer` is the `DecoderLayer` (it knows its `index` and its `ffn`), x the normed FFN input
[batch, seq, model], residual what x was made from; y is added to the residual stream, aux is
collected over the layers and handed back to the caller.
"""

SampleFn = Callable[[jax.Array, Any], tuple[jax.Array, Any]]
"""`sample_fn(logits [batch, vocab], state) -> (ids int32 [batch], state)`, traced into the step."""

ProgressFn = Callable[[int, int], None]
"""`progress_fn(done, total)`: called by long work between its steps."""


SayFn = Callable[[str], None]
"""`say_fn(line)`: tells people what long work found out."""


class DecodeState(NamedTuple):
    """Everything a token step reads and writes, on the device; donated from step to step.

    Attributes:
        caches: the KV cache, or what the executor keeps in its place.
        lengths: int32 [batch], tokens in the caches.
        ids: int32 [batch], the newest token of each sequence, not yet in the caches.
        sampler: whatever the `SampleFn` carries.
        rows: float32 [3], neurons predicted, computed and active so far, summed over layers, tokens and
            batch; zeros in mode "dense".
    """

    caches: Any
    lengths: jax.Array
    ids: jax.Array
    sampler: Any
    rows: jax.Array


class Executor(Protocol):
    """Runs a decoder token by token, on one device or split over two."""

    config: ModelConfig

    def prefill(
        self, ids: AnyArray, lengths: AnyArray, *, capacity: int, sample_fn: SampleFn, sampler: Any
    ) -> DecodeState:
        """Processes the prompts and samples the first new token of each.

        Args:
            ids: int32 [batch, seq], each prompt padded on its right; what stands there is never seen.
            lengths: int32 [batch], of the prompts without padding, at least 1.
            capacity: tokens the caches hold, at least seq.
            sample_fn: a module-level function, as it is a static argument.
            sampler: its first state.
        """
        ...

    def step(self, state: DecodeState, *, sample_fn: SampleFn) -> DecodeState:
        """Appends `state.ids` to the caches and samples the next token of each sequence."""
        ...

    def reserve(self, state: DecodeState, capacity: int) -> DecodeState:
        """The state with caches of at least `capacity` tokens; the same state if they are."""
        ...
