"""The importable sparse layer, and the `ffn_fn`s that run it densely, exactly or predicted."""

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from pjax import ops
from pjax.base import FfnCounts, FfnFn, Predictors
from pjax.model_config import Activation
from pjax.predictor import predict_mask
from pjax.weights import AnyFfn, Ffn, PackedFfn


class PackedRows(nnx.Variable):
    """Quantised weights, uint8 [rows, bytes]: no `nnx.Param`, so gradients of parameters leave them alone."""


def random_weight(
    rngs: nnx.Rngs | None, shape: tuple[int, ...], scale: float, dtype: jax.typing.DTypeLike = jnp.float32
) -> nnx.Param:
    """Normal numbers of deviation `scale`; without rngs only a shape, of a weight that is yet to be set."""
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param((jax.random.normal(rngs.params(), shape) * scale).astype(dtype))


class SparseFfn(nnx.Module):
    """An FFN that computes only its active neurons.

    `y = f(x @ gate.T + gate_bias) * (x @ up.T + up_bias) @ down + down_bias`, or without a gate
    `y = f(x @ up.T + up_bias) @ down + down_bias`; a neuron that f closes is skipped.

    Args:
        model: width of input and output.
        neurons: number of neurons.
        activation: f, "relu", "relu2", "drelu" or, with its threshold, "fatrelu:0.01"; "silu", "gelu" and
            "gelu_pytorch_tanh" run dense only.
        gated: whether there is a gate.
        bias: whether gate, up and down carry biases.
        dtype: of the weights; biases are float32.
        rngs: of the initial weights, normal with variance 1 / fan-in; None leaves them to be set.
    """

    def __init__(
        self,
        model: int,
        neurons: int,
        *,
        activation: str = "relu",
        gated: bool = True,
        bias: bool = False,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None,
    ):
        if model < 1 or neurons < 1:
            raise ValueError(f"model, neurons: expected widths of at least 1, got {model}, {neurons}")
        Activation.parse(activation)

        def rows(fan_in: int) -> nnx.Param:
            return random_weight(rngs, (neurons, model), fan_in**-0.5, dtype)

        def zeros(width: int, wanted: bool) -> nnx.Param | None:
            return nnx.Param(jnp.zeros(width)) if wanted else None

        self.activation = activation
        self.model, self.gated = model, gated
        self.packed = nnx.data(None)
        self.format: str | None = None
        self.gate = rows(model) if gated else nnx.data(None)
        self.up = rows(model)
        self.down = rows(neurons)
        self.gate_bias = zeros(neurons, bias and gated)
        self.up_bias = zeros(neurons, bias)
        self.down_bias = zeros(model, bias)

    @classmethod
    def from_kernels(
        cls,
        gate: jax.Array | None,
        up: jax.Array,
        down: jax.Array,
        *,
        activation: str = "relu",
        layout: str = "in_out",
    ) -> Self:
        """The layer made of somebody else's kernels.

        Args:
            gate: [model, neurons] or None.
            up: [model, neurons].
            down: [neurons, model].
            activation: as in the constructor.
            layout: "in_out" for kernels as Flax and Haiku store them (shapes above), "out_in" for
                their transposes as PyTorch stores them.

        Raises:
            ValueError: if the shapes do not belong together or the layout is unknown.
        """
        if layout not in ("in_out", "out_in"):
            raise ValueError(f'layout: expected "in_out" or "out_in", got {layout!r}')
        if jnp.ndim(up) != 2:
            raise ValueError(f"up: expected a kernel [model, neurons], got shape {list(jnp.shape(up))}")
        gate, up, down = (  # type: ignore[assignment]  # only gate may be None
            None if kernel is None else jnp.asarray(kernel).T if layout == "out_in" else jnp.asarray(kernel)
            for kernel in (gate, up, down)
        )
        for name, kernel, shape in (("gate", gate, up.shape), ("down", down, up.shape[::-1])):
            if kernel is not None and kernel.shape != shape:
                raise ValueError(
                    f"{name}: expected shape {shape} beside up {up.shape} ([model, neurons], both after "
                    f"layout={layout!r}), got {kernel.shape}; is it transposed?"
                )
        model, neurons = up.shape
        layer = cls(model, neurons, activation=activation, gated=gate is not None, rngs=None)
        layer.set_weights(Ffn(None if gate is None else gate.T, up.T, down))
        return layer

    @property
    def weights(self) -> AnyFfn:
        """The neurons as rows, without the down bias."""

        def value(param: nnx.Variable | None) -> Any:
            return None if param is None else param[...]

        biases = {"gate_bias": value(self.gate_bias), "up_bias": value(self.up_bias)}
        if self.packed is not None and self.format is not None:
            return PackedFfn(self.packed[...], self.format, self.model, self.gated, **biases)
        return Ffn(gate=value(self.gate), up=value(self.up), down=value(self.down), **biases)

    def set_weights(self, ffn: AnyFfn) -> None:
        """Replaces the neurons, by as many or as few as `ffn` has, of any type; the down bias stays.

        Raises:
            ValueError: if `ffn` has a gate or a bias that this layer lacks, or the other way round.
        """
        for name, has, comes in (
            ("gate", self.gated, ffn.gated),
            ("gate_bias", self.gate_bias is not None, ffn.gate_bias is not None),
            ("up_bias", self.up_bias is not None, ffn.up_bias is not None),
        ):
            if has != comes:
                wrong = "has one, but none" if has else "has none, but one"
                raise ValueError(f"ffn.{name}: this layer {wrong} came")
        packed = isinstance(ffn, PackedFfn)
        self.packed = PackedRows(ffn.rows) if packed else None
        self.format = ffn.format if packed else None
        for name in ("gate", "up", "down"):
            rows = None if packed else getattr(ffn, name)
            setattr(self, name, None if rows is None else nnx.Param(rows))
        for name in ("gate_bias", "up_bias"):
            if getattr(ffn, name) is not None:
                getattr(self, name).set_value(getattr(ffn, name))

    def add_down_bias(self, y: jax.Array) -> jax.Array:
        """`y + down_bias` for y [..., model], the sum of the blocks."""
        if self.down_bias is None:
            return y
        return y + self.down_bias[...].reshape((1,) * (y.ndim - 1) + (-1,))

    def __call__(self, x: jax.Array, active_mask: jax.Array | None = None) -> jax.Array:
        """Runs the layer on its active neurons.

        Args:
            x: [..., model].
            active_mask: bool [..., neurons], neurons that may be computed; None lets each
                neuron's own gate decide, which gives the dense result.

        Returns:
            float32 [..., model].
        """
        return self.counted(x, active_mask)[0]

    def counted(self, x: jax.Array, active_mask: jax.Array | None = None) -> tuple[jax.Array, FfnCounts]:
        """As the call itself, with the number of neurons predicted, computed and active per token."""
        leading, tokens, neurons = x.shape[:-1], math.prod(x.shape[:-1]), self.weights.neurons
        if active_mask is not None:
            if active_mask.shape not in ((*leading, neurons), (neurons,)):
                raise ValueError(
                    f"active_mask: expected shape {[*leading, neurons]} ([..., neurons], led as x "
                    f"{list(x.shape)}) or [{neurons}], got {list(active_mask.shape)}"
                )
            active_mask = jnp.broadcast_to(active_mask, (*leading, neurons)).reshape(tokens, neurons)
        y, counts = ops.sparse_ffn_counted(
            x.reshape(tokens, x.shape[-1]), self.weights, active_mask, activation=self.activation
        )
        counts = FfnCounts(*(count.reshape(leading) for count in counts))
        return self.add_down_bias(y.reshape(x.shape)), counts

    def dense(self, x: jax.Array) -> jax.Array:
        """Runs the layer on every neuron; x [..., model] -> float32 [..., model]."""
        return self.add_down_bias(ops.dense_ffn(x, self.weights, activation=self.activation))


def dense_ffn_fn(layer, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, None]:
    """The `ffn_fn` of mode "dense": every neuron."""
    del residual
    return layer.ffn.dense(x), None


def exact_ffn_fn(layer, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, FfnCounts]:
    """The `ffn_fn` of mode "exact": each neuron's own gate decides."""
    del residual
    return layer.ffn.counted(x)


def predicted_ffn_fn(predictors: Predictors) -> FfnFn:
    """The `ffn_fn` of mode "predicted": the predictor's mask first, then as exact within it.

    A layer without a predictor runs as in mode "exact".
    """

    def ffn_fn(layer, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, FfnCounts]:
        predictor = predictors.layers[layer.index]
        return layer.ffn.counted(x, None if predictor is None else predict_mask(predictor, x, residual))

    return ffn_fn
