"""What a decoder is, whatever file it came from: its sizes, its activation, its positions, its block."""

import dataclasses
import math
from typing import Literal, NamedTuple, Self

SPARSE_ACTIVATIONS = ("relu", "relu2", "fatrelu", "drelu")
"""Activation functions that are exactly zero over a half-line, so that neurons can be skipped."""

DENSE_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""Those that are zero nowhere."""


class Activation(NamedTuple):
    """The function between an FFN's matrices, written `relu` or, with its threshold, `fatrelu:0.01`.

    With o = x . gate + gate_bias (ungated: x . up + up_bias) and u = x . up + up_bias, the value that
    multiplies the down row is f(o) * u (ungated: f(o)), where f is

        relu     max(o, 0)
        relu2    max(o, 0)**2                   (So et al., arXiv 2109.08668; Nemotron, Arcee)
        fatrelu  o if o > threshold else 0      (ProSparse, arXiv 2402.13516)
        drelu    max(o, 0), and u becomes max(u, 0); gated only   (TurboSparse, arXiv 2406.05955)

    or `silu`, `gelu` (exact) or `gelu_pytorch_tanh` (its approximation), which leave nothing at zero.

    Attributes:
        name: one of the above.
        threshold: of fatrelu, at least 0; 0 for the others.
    """

    name: str
    threshold: float = 0.0

    @property
    def is_sparse(self) -> bool:
        """Whether it leaves neurons at exactly zero."""
        return self.name in SPARSE_ACTIVATIONS

    @classmethod
    def parse(cls, text: str) -> Self:
        """The activation that a text such as "relu" or "fatrelu:0.01" names.

        Raises:
            ValueError: no such function, or its threshold is missing, superfluous or no number.
        """
        name, colon, threshold = str(text).partition(":")
        if name not in SPARSE_ACTIVATIONS + DENSE_ACTIVATIONS:
            known = ", ".join(SPARSE_ACTIVATIONS + DENSE_ACTIVATIONS)
            raise ValueError(f"activation: expected one of {known}, got {text!r}.")
        if (name == "fatrelu") != bool(colon):
            raise ValueError(
                f'activation: expected a threshold for "fatrelu" alone, as fatrelu:0.01, got {text!r}.'
            )
        try:
            value = float(threshold) if colon else 0.0
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ValueError(f"activation: expected a threshold of at least 0 after the colon, got {text!r}.")
        return cls(name, value)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv 2104.09864) and how they are stretched to longer contexts.

    `ops`-free description; `pjax.attention.rotary_frequencies` says what each kind computes.

    Attributes:
        theta: base of the frequencies.
        width: leading entries of a head that are rotated; even, at most head_dim.
        kind: how the frequencies are scaled.
        factor: by which the context is stretched ("linear", "dynamic", "llama3", "yarn").
        original_context: tokens of the context before ("dynamic", "llama3", "yarn").
        low_freq_factor: of "llama3".
        high_freq_factor: of "llama3".
        beta_fast: of "yarn".
        beta_slow: of "yarn".
        truncate: whether "yarn" rounds its correction range to whole entries.
        attention_factor: multiplies the rotated queries and keys ("yarn"; of any kind in GGUF files).
        divisors: of the frequencies, one per pair, as GGUF files store them; then kind is "divisors".
    """

    theta: float
    width: int
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "divisors"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What a decoder is.

    Attributes:
        name: for people; the folder's or file's name.
        family: key of the family it was read as, for people and for saving ("llama", "opt", "falcon", ...).
        vocab: number of token ids.
        model: residual width.
        neurons: FFN rows, one entry a layer.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: width of one head.
        context: the most tokens a sequence may have, prompt and generated together.
        activation: as `Activation.parse` reads it.
        gated: whether the FFN has a gate.
        norm: "rms" or "layer".
        norm_eps: added to the variance.
        norm_scale: whether norms carry a scale.
        norm_bias: whether norms carry a bias.
        final_norm: whether there is a norm before the head.
        block: "sequential": attention, then FFN, each behind its norm; "parallel": both read the layer's
            input; "post_norm": the normed value is also what the result is added to (OPT-350m; canonical
            names shift: a layer's attention norm is the one that ends the layer before, so layer 0 has none).
        rope: rotary positions, or None.
        learned_positions: whether there is a table of learned positions.
        position_offset: its first used row (OPT: 2).
        alibi: whether scores fall linearly with distance (arXiv 2108.12409), before they are scaled.
        window: keys that a query sees, itself included; None for all before it.
        attention_bias: whether q, k, v and o carry biases.
        mlp_bias: whether gate, up and down carry biases.
        tied: whether the head is the embedding.
        embed_width: of embedding and head; where it is not `model`, projections lead in and out.
        embed_scale: multiplies embeddings.
        residual_scale: multiplies what attention and FFN add to the residual stream.
        logit_scale: multiplies the input of the head.
        bos_id: first token of a text, or None.
        eos_ids: ids that end a text.
    """

    name: str
    family: str
    vocab: int
    model: int
    neurons: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    activation: str
    gated: bool
    norm: Literal["rms", "layer"]
    norm_eps: float
    bos_id: int | None
    eos_ids: tuple[int, ...]
    norm_scale: bool = True
    norm_bias: bool = False
    final_norm: bool = True
    block: Literal["sequential", "parallel", "post_norm"] = "sequential"
    rope: Rope | None = None
    learned_positions: bool = False
    position_offset: int = 0
    alibi: bool = False
    window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    embed_width: int = 0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    def __post_init__(self):
        """Fills in what follows from the rest."""
        if not self.embed_width:
            object.__setattr__(self, "embed_width", self.model)

    def replace(self, **changes) -> Self:
        """Returns the config with other values."""
        return dataclasses.replace(self, **changes)

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.neurons)

    @property
    def is_sparse(self) -> bool:
        """Whether the activation leaves neurons at exactly zero."""
        return Activation.parse(self.activation).is_sparse
