"""The sampler against NumPy's sort in float64, against counted frequencies, and the values it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax.sampling import NOT_A_TOKEN, check_integer, check_seed, keep_likely, make_sampler, penalize

BATCH, VOCAB = 400, 8
"""One shape for most tests, as each one more compiles another program."""


def draw(logits, **settings):
    """One token for each row of logits [batch, vocab], row i with seed i; returns (ids, next state)."""
    logits = jnp.asarray(logits)
    batch, vocab = logits.shape
    settings = {"prompts": [[0]] * batch, "seeds": range(batch)} | settings
    sample_fn, state = make_sampler(settings.pop("prompts"), settings.pop("seeds"), vocab, **settings)
    ids, state = jax.jit(sample_fn)(logits, state)
    return np.asarray(ids), state


def expected_mask(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """`keep_likely` of one row, by sorting in float64."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")[:top_k]
    weights = np.exp(logits.astype(np.float64) - logits.max())
    before = np.cumsum(weights[order] / weights[order].sum()) - weights[order] / weights[order].sum()
    order = order[(before < top_p) | (np.arange(len(order)) == 0)]
    mask = np.zeros(len(logits), bool)
    mask[order[weights[order] >= min_p]] = True
    return mask


@pytest.mark.parametrize("top_k", [1, 5, 400, 1000])
@pytest.mark.parametrize(
    "top_p, min_p", [(1.0, 0.0), (0.0, 0.0), (0.5, 0.0), (0.9, 0.05), (1.0, 0.3), (1.0, 1.0)]
)
def test_kept_tokens_are_those_of_a_sort(top_k, top_p, min_p):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 1000)).astype(np.float32) * 3
    logits[1] = np.round(logits[1])  # Many equal logits: the lower ids come first.
    logits[2] -= 50
    mask = jax.jit(keep_likely)(logits, np.float32(top_k), np.float32(top_p), np.float32(min_p))
    for row in range(3):
        np.testing.assert_array_equal(mask[row], expected_mask(logits[row], top_k, top_p, min_p))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("top_p, most", [(0.0, 1), (1e-8, 1), (1e-3, 5)])
def test_a_small_top_p_keeps_the_best_of_flat_logits(dtype, top_p, most):
    flat = jnp.full((1, 4096), 2.5, dtype).astype(jnp.float32)
    mask = jax.jit(keep_likely)(flat, np.float32(4096), np.float32(top_p), np.float32(0))
    assert mask[0, 0]
    assert 1 <= mask.sum() <= most


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-300, 1e-6, 1e-5])
def test_tiny_temperatures_are_greedy(temperature):
    logits = np.random.default_rng(1).normal(size=(BATCH, VOCAB)).astype(np.float32) * 40
    ids, _ = draw(logits, temperature=temperature)
    np.testing.assert_array_equal(ids, logits.argmax(-1))


def test_equal_logits_give_the_lowest_id_when_greedy():
    assert draw(np.zeros((1, VOCAB), np.float32))[0] == [0]


@pytest.mark.parametrize(
    "top_k, num_kept", [(0, 8), (-1, 8), (1, 1), (3, 3), (8, 8), (9, 8), (10**9, 8), (10**30, 8)]
)
def test_top_k_bounds(top_k, num_kept):
    logits = np.tile(np.linspace(0.1, 0, VOCAB, dtype=np.float32)[None], (BATCH, 1))
    ids, _ = draw(logits, temperature=1.0, top_k=top_k)
    assert set(ids) == set(range(num_kept))


def test_penalty_counts_an_id_once():
    _, state = make_sampler([[0, 2, 3, 3]], [0], 5, repetition_penalty=1.5)
    logits = jnp.array([[2.0, 1.0, 0.0, -1.0, -3.0]])
    np.testing.assert_allclose(penalize(logits, state), [[4 / 3, 1.0, 0.0, -1.5, -3.0]], rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_penalty_sees_prompt_and_output(temperature):
    logits = jnp.array([[3.0, 2.9, 2.8, 1.0]] * 2)
    sample_fn, state = make_sampler([[0], [1]], [0, 0], 4, temperature=temperature, repetition_penalty=2.0)
    step, drawn = jax.jit(sample_fn), []
    for _ in range(3):
        ids, state = step(logits, state)
        drawn.append(ids.tolist())
    assert drawn == [[1, 0], [2, 2], [0, 0]]


def test_frequencies_are_the_probabilities():
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.0], np.float32)
    rows = jnp.asarray(np.tile(logits[None], (BATCH, 1)))
    sample_fn, state = make_sampler([[0]] * BATCH, range(BATCH), VOCAB, temperature=0.7, top_k=6, min_p=0.1)
    step, counts, num_steps = jax.jit(sample_fn), np.zeros(VOCAB), 20
    for _ in range(num_steps):
        ids, state = step(rows, state)
        counts += np.bincount(np.asarray(ids), minlength=VOCAB)
    weights = np.exp(logits / 0.7) * expected_mask(logits, 6, 1.0, 0.1)
    expected = num_steps * BATCH * weights / weights.sum()
    is_possible = expected > 0
    assert not counts[~is_possible].any()
    chi_square = ((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    # It has at most 5 degrees of freedom: above 25 by chance is rarer than 1 in 7000.
    assert chi_square < 25


def test_filters_come_before_temperature():
    logits = np.full((BATCH, VOCAB), -9.0, np.float32)
    logits[:, :4] = [2.0, 1.0, 0.0, -1.0]
    # At temperature 1 the best token alone holds 0.64, and it is all that may be drawn at any other.
    ids, _ = draw(logits, temperature=100.0, top_p=0.6)
    assert not ids.any()


def test_rows_with_one_seed_are_equal_and_all_64_bits_of_it_matter():
    logits = np.zeros((BATCH, VOCAB), np.float32)
    seeds = [3] * 100 + [3 + 2**32] * 100 + [3 + 2**63] * 100 + [4] * 100
    sample_fn, state = make_sampler([[0]] * BATCH, seeds, VOCAB, temperature=1.0)
    step, drawn = jax.jit(sample_fn), []
    for _ in range(20):
        ids, state = step(jnp.asarray(logits), state)
        drawn.append(np.asarray(ids).reshape(4, 100))
    texts = np.stack(drawn)
    assert (texts == texts[:, :, :1]).all()
    assert len({tuple(texts[:, i, 0]) for i in range(4)}) == 4
    assert len(set(texts[:, 0, 0])) > 3  # The key moves on from token to token.


def test_a_row_equals_its_single_run():
    logits = np.random.default_rng(2).normal(size=(5, 300)).astype(np.float32)
    settings = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2}
    prompts = [[i, 2 * i] for i in range(5)]
    together, _ = draw(logits, prompts=prompts, seeds=[7] * 5, **settings)
    alone = [
        draw(logits[i : i + 1], prompts=prompts[i : i + 1], seeds=[7], **settings)[0][0] for i in range(5)
    ]
    np.testing.assert_array_equal(together, alone)


def test_other_values_compile_nothing():
    logits, sizes = jnp.zeros((BATCH, VOCAB)), []
    for settings in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 2.0}):
        settings = {"temperature": 1.0} | settings
        sample_fn, state = make_sampler([[0]] * BATCH, range(BATCH), VOCAB, **settings)
        step = jax.jit(sample_fn)
        step(logits, state)
        sizes.append(step._cache_size())
    assert len(set(sizes)) == 1


def test_plain_greedy_carries_nothing():
    assert jax.tree.leaves(make_sampler([[0]], [1], VOCAB)[1]) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_told(temperature):
    logits = np.zeros((BATCH, VOCAB), np.float32)
    logits[1, 3] = np.nan
    ids, _ = draw(logits, temperature=temperature)
    assert ids[0] != NOT_A_TOKEN and ids[1] == NOT_A_TOKEN


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits_are_never_drawn(temperature):
    logits = np.full((BATCH, VOCAB), -np.inf, np.float32)
    logits[:, 6] = -3
    ids, _ = draw(logits, temperature=temperature, min_p=0.0)
    assert set(ids) == {6}


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("place", [0, 20000, 31999])
def test_one_nan_among_many_logits_is_told(settings, place):
    """XLA's maximum of so many numbers on a CPU is not NaN."""
    logits = np.random.default_rng(0).standard_normal((2, 32000), np.float32)
    logits[1, place] = np.nan
    ids, _ = draw(logits, **settings)
    assert ids[0] >= 0 and ids[1] == NOT_A_TOKEN


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "name, values",
    [
        ("temperature", [NAN, INF, -INF, -0.1, 999999, "0.7", True, None, 10**400]),
        ("top_p", [NAN, INF, -0.1, 1.1, "1", True, None]),
        ("min_p", [NAN, INF, -0.1, 1.1, "0", False, None]),
        ("repetition_penalty", [NAN, INF, 0, -1.0, 999999, "1.1", True, None]),
        ("top_k", [NAN, 1.5, 40.0, -2, "40", True, None]),
    ],
)
def test_wrong_values_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}: expected .* got"):
            make_sampler([[0]], [0], VOCAB, **{name: value})


def test_numpy_numbers_are_numbers():
    make_sampler([[0]], [0], VOCAB, temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.5))


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", True])
def test_wrong_seeds_are_refused(seed):
    with pytest.raises(ValueError, match="^seed: expected an integer from 0 to"):
        check_seed(seed)


def test_fresh_seeds_differ():
    assert len({check_seed(None) for _ in range(5)}) > 1
    assert check_seed(12) == 12


def test_integers_without_an_upper_limit():
    assert check_integer("n", 10**30, 0) == 10**30
    with pytest.raises(ValueError, match="^n: expected an integer of at least 0, got -1"):
        check_integer("n", -1, 0)
