"""Splitting and merging: the same weights, the same function, and tables that are refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax import ops
from pjax.split import (
    SplitFfn,
    check_neuron_tables,
    merge_ffn,
    pack_mask,
    split_ffn,
    unpack_mask,
)
from pjax.weights import Ffn

NEURONS, MODEL = 19, 6
HOT_MASKS = {
    "none": np.zeros(NEURONS, bool),
    "all": np.ones(NEURONS, bool),
    "one": np.arange(NEURONS) == 7,
    "scattered": np.random.default_rng(0).random(NEURONS) < 0.4,
}


def make_ffn(gated: bool = True, biases: bool = True, dtype=jnp.float32) -> Ffn:
    rng = np.random.default_rng(1)

    def rows():
        return jnp.asarray(rng.normal(size=(NEURONS, MODEL)), dtype)

    def bias():
        return jnp.asarray(rng.normal(size=NEURONS), jnp.float32)

    return Ffn(
        gate=rows() if gated else None,
        up=rows(),
        down=rows(),
        gate_bias=bias() if gated and biases else None,
        up_bias=bias() if biases else None,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", HOT_MASKS)
def test_merge_inverts_split(name, gated, biases, dtype):
    ffn, hot_mask = make_ffn(gated, biases, dtype), HOT_MASKS[name]
    split = split_ffn(ffn, hot_mask)
    np.testing.assert_array_equal(split.hot_ids, np.flatnonzero(hot_mask))
    np.testing.assert_array_equal(split.cold_ids, np.flatnonzero(~hot_mask))
    np.testing.assert_array_equal(split.hot.up, np.asarray(ffn.up)[hot_mask])
    assert split.hot_ids.dtype == split.cold_ids.dtype == jnp.int32
    merged = merge_ffn(split)
    assert jax.tree.structure(merged) == jax.tree.structure(ffn)
    for got, expected in zip(jax.tree.leaves(merged), jax.tree.leaves(ffn), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", HOT_MASKS)
def test_blocks_sum_to_the_whole(name, gated):
    ffn = make_ffn(gated)
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(3, MODEL)), jnp.float32)
    mask = jnp.asarray(rng.random((3, NEURONS)) < 0.7)
    split = split_ffn(ffn, HOT_MASKS[name])
    hot_active, cold_active = mask[:, split.hot_ids], mask[:, split.cold_ids]

    def run(x, block, active):
        return ops.sparse_ffn(x, block, active, activation="relu", implementation="reference")

    total = run(x, split.hot, hot_active) + run(x, split.cold, cold_active)
    # One rounding for each of the additions that may happen in another order, of the largest sum.
    largest = float(run(jnp.abs(x), jax.tree.map(jnp.abs, ffn), None).max())
    num_additions = NEURONS + 2 * MODEL
    np.testing.assert_allclose(total, run(x, ffn, mask), rtol=0, atol=num_additions * 2.0**-24 * largest)


def test_split_goes_through_jit_as_a_pytree():
    split = split_ffn(make_ffn(), HOT_MASKS["scattered"])
    again = jax.jit(lambda s: s)(split)
    assert isinstance(again, SplitFfn)
    np.testing.assert_array_equal(merge_ffn(again).down, make_ffn().down)


@pytest.mark.parametrize(
    "mask", [np.ones(NEURONS + 1, bool), np.ones(NEURONS, np.int32), np.ones((1, NEURONS), bool)]
)
def test_masks_of_another_layer_are_refused(mask):
    with pytest.raises(ValueError, match=r"hot_mask: expected bool \[neurons\] = \[19\]"):
        split_ffn(make_ffn(), mask)


@pytest.mark.parametrize(
    ("hot_ids", "cold_ids", "message"),
    [
        ([0, 1], [1, 2, 3], "1 are there twice: 1"),
        ([0, 0], [1, 2, 3], "1 are there twice: 0"),
        ([0, 4], [1, 2, 3], r"1 are outside 0\.\.3: 4"),
        ([-1], [1, 2, 3], r"1 are outside 0\.\.3: -1"),
        ([0], [2], "2 are missing: 1, 3"),
        ([], [], r"4 are missing: 0, 1, 2, 3"),
    ],
)
def test_wrong_neuron_tables_are_refused(hot_ids, cold_ids, message):
    with pytest.raises(ValueError, match=message):
        check_neuron_tables(jnp.asarray(hot_ids, jnp.int32), jnp.asarray(cold_ids, jnp.int32), 4)


def test_right_neuron_tables_pass():
    check_neuron_tables(jnp.asarray([1, 3]), jnp.asarray([0, 2]), 4)
    check_neuron_tables(jnp.asarray([], jnp.int32), jnp.asarray([0]), 1)


def test_merge_refuses_blocks_that_do_not_fit():
    split = split_ffn(make_ffn(), HOT_MASKS["scattered"])
    other = split_ffn(make_ffn(gated=False), HOT_MASKS["scattered"])
    with pytest.raises(ValueError, match="both blocks or in neither"):
        merge_ffn(SplitFfn(split.hot, other.cold, split.hot_ids, split.cold_ids))
    with pytest.raises(ValueError, match="hot_ids: expected one number for each of"):
        merge_ffn(SplitFfn(split.hot, split.cold, split.cold_ids, split.hot_ids))


@pytest.mark.parametrize("neurons", [0, 1, 7, 8, 9, 67])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_packed_masks_are_the_same_bits(batch, neurons):
    mask = np.random.default_rng(3).random((*batch, neurons)) < 0.5
    bits = np.asarray(jax.jit(pack_mask)(jnp.asarray(mask)))
    assert bits.dtype == jnp.uint8 and bits.shape == (*batch, -(-neurons // 8))
    for index in np.ndindex(*batch, neurons):
        *row, i = index
        assert (int(bits[(*row, i // 8)]) >> (i % 8)) & 1 == mask[index]
    np.testing.assert_array_equal(unpack_mask(jnp.asarray(bits), neurons), mask)


def test_unpack_refuses_another_width():
    with pytest.raises(ValueError, match=r"bits: expected uint8 \[\.\.\., 2\] for 9 neurons"):
        unpack_mask(jnp.zeros(1, jnp.uint8), 9)
