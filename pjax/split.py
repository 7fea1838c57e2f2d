"""Splits an FFN into its hot and its cold neurons, and puts them back together.

A neuron is a row, so both blocks are again FFNs, and a neuron table is the original number of each
row. `ffn(x) = hot(x) + cold(x)`; where the blocks live is the executor's business.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pjax.weights import Ffn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitFfn:
    """The FFN of one layer in two blocks, with their neuron tables.

    Attributes:
        hot: the neurons of the device.
        cold: the neurons of the host.
        hot_ids: int32 [hot], original number of each hot row, ascending.
        cold_ids: int32 [cold], original number of each cold row, ascending.
    """

    hot: Ffn
    cold: Ffn
    hot_ids: jax.Array
    cold_ids: jax.Array


def split_ffn(ffn: Ffn, hot_mask: np.ndarray) -> SplitFfn:
    """Takes the hot and the cold rows of an FFN; `merge_ffn` is the inverse.

    Args:
        ffn: the FFN of a layer.
        hot_mask: bool [neurons], one entry of `Placement.hot_mask`.

    Raises:
        ValueError: if the mask is not bool or not of this FFN's width.
    """
    hot_mask = np.asarray(hot_mask)
    if hot_mask.dtype != np.bool_ or hot_mask.shape != (ffn.neurons,):
        raise ValueError(
            f"hot_mask: expected bool [neurons] = [{ffn.neurons}], got {hot_mask.dtype} "
            f"{list(hot_mask.shape)}; use the placement's mask of this layer"
        )
    hot_ids = jnp.asarray(np.flatnonzero(hot_mask), jnp.int32)
    cold_ids = jnp.asarray(np.flatnonzero(~hot_mask), jnp.int32)
    return SplitFfn(_take_rows(ffn, hot_ids), _take_rows(ffn, cold_ids), hot_ids, cold_ids)


def merge_ffn(split: SplitFfn) -> Ffn:
    """Puts the rows of both blocks back in their original order.

    Args:
        split: the blocks, with concrete neuron tables.

    Raises:
        ValueError: if the blocks are of different kinds, a table does not have one number for each
            row, or the tables are not those of one layer (see `check_neuron_tables`).
    """
    if jax.tree.structure(split.hot) != jax.tree.structure(split.cold):
        raise ValueError(
            "split: expected gate and biases in both blocks or in neither, got "
            f"{_names(split.hot)} in hot and {_names(split.cold)} in cold; split the layer again"
        )
    for name, ids, block in (("hot", split.hot_ids, split.hot), ("cold", split.cold_ids, split.cold)):
        if ids.shape != (block.neurons,):
            raise ValueError(
                f"{name}_ids: expected one number for each of the {block.neurons} rows, got shape "
                f"{list(ids.shape)}; split the layer again"
            )
    check_neuron_tables(split.hot_ids, split.cold_ids, split.hot.neurons + split.cold.neurons)
    rows = jnp.argsort(jnp.concatenate([split.hot_ids, split.cold_ids]))
    both = jax.tree.map(lambda hot, cold: jnp.concatenate([hot, cold]), split.hot, split.cold)
    return _take_rows(both, rows)


def check_neuron_tables(hot_ids: jax.Array, cold_ids: jax.Array, neurons: int) -> None:
    """Refuses tables that do not name every neuron of a layer exactly once.

    Args:
        hot_ids: int [hot].
        cold_ids: int [cold].
        neurons: neurons of the layer.

    Raises:
        ValueError: naming the neurons that are out of range, there twice, or missing.
    """
    ids = np.concatenate([np.asarray(hot_ids), np.asarray(cold_ids)])
    outside = ids[(ids < 0) | (ids >= neurons)]
    counts = np.bincount(ids[(ids >= 0) & (ids < neurons)], minlength=neurons)
    for problem, wrong_ids in (
        (f"outside 0..{neurons - 1}", outside),
        ("there twice", np.flatnonzero(counts > 1)),
        ("missing", np.flatnonzero(counts == 0)),
    ):
        if wrong_ids.size:
            shown = ", ".join(str(i) for i in wrong_ids[:5]) + (", ..." if wrong_ids.size > 5 else "")
            raise ValueError(
                f"hot_ids and cold_ids: expected each of {neurons} neurons once, but {wrong_ids.size} are "
                f"{problem}: {shown}; split the layer again"
            )


def pack_mask(mask: jax.Array) -> jax.Array:
    """One bit a neuron, an eighth of the bytes to send: bit i % 8 of byte i // 8 is neuron i.

    Args:
        mask: bool [..., neurons].

    Returns:
        uint8 [..., ceil(neurons / 8)]; the unused bits are zero.
    """
    return jnp.packbits(mask, axis=-1, bitorder="little")


def unpack_mask(bits: jax.Array, neurons: int) -> jax.Array:
    """The inverse of `pack_mask`.

    Args:
        bits: uint8 [..., ceil(neurons / 8)].
        neurons: entries of the mask.

    Returns:
        bool [..., neurons].

    Raises:
        ValueError: if bits has another number of bytes.
    """
    if bits.dtype != jnp.uint8 or bits.shape[-1] != (neurons + 7) // 8:
        raise ValueError(
            f"bits: expected uint8 [..., {(neurons + 7) // 8}] for {neurons} neurons, got {bits.dtype} "
            f"{list(bits.shape)}; pack the mask with pack_mask"
        )
    return jnp.unpackbits(bits, axis=-1, count=neurons, bitorder="little").astype(bool)


def _take_rows(ffn: Ffn, ids: jax.Array) -> Ffn:
    return jax.tree.map(lambda rows: jnp.take(rows, ids, axis=0), ffn)


def _names(ffn: Ffn) -> str:
    present = [f.name for f in dataclasses.fields(ffn) if getattr(ffn, f.name) is not None]
    return ", ".join(present)
