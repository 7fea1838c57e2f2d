"""The FFN operators: which implementation runs, how they batch and how they differentiate."""

from typing import Literal

import jax
import jax.numpy as jnp

from pjax.base import Ffn, FfnCounts
from pjax.ops import checks, reference

Implementation = Literal["reference", "cpu"]


def sparse_ffn(
    x: jax.Array,
    ffn: Ffn,
    active_mask: jax.Array | None,
    *,
    activation: str,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The FFN restricted to the neurons of the mask, without those that their own gate closes."""
    return sparse_ffn_counted(x, ffn, active_mask, activation=activation, implementation=implementation)[0]


def sparse_ffn_counted(
    x: jax.Array,
    ffn: Ffn,
    active_mask: jax.Array | None,
    *,
    activation: str,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, FfnCounts]:
    """`sparse_ffn` together with how many neurons each token predicted, computed and found active."""
    checks.check_sparse_activation(activation)
    checks.check_ffn(ffn)
    checks.check_input(x, ffn.up.shape[1], ranks=(1, 2))
    checks.check_mask(active_mask, x, ffn.neurons)
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    mask = None
    if active_mask is not None:
        mask = jnp.broadcast_to(active_mask.reshape(-1, ffn.neurons), (rows.shape[0], ffn.neurons))
    y, counts = reference.sparse_ffn(rows, ffn, mask)
    return y.reshape(x.shape), counts


def dense_ffn(
    x: jax.Array, ffn: Ffn, *, activation: str, implementation: Implementation | None = None
) -> jax.Array:
    """The FFN with every neuron."""
    checks.check_activation(activation)
    checks.check_ffn(ffn)
    checks.check_input(x, ffn.up.shape[1], ranks=None)
    return reference.dense_ffn(x, ffn, activation)
