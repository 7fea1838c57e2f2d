"""Chooses which layers are closed, open or whole, by python-mip, and how many neurons each gets.

Given the states of the layers, the best numbers of hot neurons follow exactly: gains fall, so the price of
a byte decides. The integer program therefore has its binary variables for the states alone. In its block
form an open layer carries its first neurons at once, so that "none or at least C" needs no big-M, and the
further neurons, in groups, are continuous.
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from pjax.placement.problem import LayerCurve

State = Literal["closed", "open", "whole"]
"""Of a layer, see `LayerCurve`."""

Formulation = Literal["block", "literal"]
"""How the integer program is written: see the module, or equations 6 to 8 of the paper as they stand."""

# At CBC's default, 1e-4, "optimal" is visibly not; 1e-6 is below the noise of any profile.
_MIP_GAP = 1e-6
# Any fixed number: the solver breaks ties by it.
_SEED = 1
# The objective's size for the solver, whose tolerances are absolute, some 1e-7: seconds would vanish.
_SCALE = 1e4
# Rounding errors of a sum of a million frequencies, relative: what is closer to its bound is optimal.
_EXACT = 1e-9
# Halvings of an interval of float64 prices until it is as narrow as they are.
_HALVINGS = 60


class Choice(NamedTuple):
    """How many neurons are hot in each layer, and what is known of how good that is.

    Attributes:
        states: of the layers.
        num_hot: of the layers.
        value: what they are worth.
        bound: proven upper bound of the worth of any choice, of single neurons too.
        status: "optimal", "feasible" (the time limit was hit) or "greedy" (without the solver).
    """

    states: tuple[State, ...]
    num_hot: tuple[int, ...]
    value: float
    bound: float
    status: Literal["optimal", "feasible", "greedy"]


def choose(
    layers: Sequence[LayerCurve],
    capacity: int,
    *,
    group_size: int,
    time_limit_s: float,
    formulation: Formulation = "block",
) -> Choice:
    """The solver's choice, or that of the prices where it is proven best or the solver has nothing better.

    Args:
        layers: what their neurons are worth.
        capacity: bytes for the hot neurons of all layers.
        group_size: neurons that are one variable.
        time_limit_s: seconds the solver may take.
        formulation: of the integer program.
    """
    unit = math.gcd(*(layer.neuron_bytes for layer in layers))
    capacity = capacity // unit * unit  # a rest that no neuron can use would loosen the bounds
    # So would layers that can never open, as the fewest neurons that they need do not fit.
    layers = [
        LayerCurve(layer.neurons, layer.neuron_bytes, np.zeros(0))
        if layer.least * layer.neuron_bytes > capacity
        else layer
        for layer in layers
    ]
    priced = choose_by_price(layers, capacity)
    can_open = any(layer.most for layer in layers)  # CBC crashes on a program without a choice
    if priced.status == "optimal" and (formulation == "block" or not can_open):
        return priced
    program = _new_program()
    if program is None:
        return priced
    scale = _SCALE / priced.bound if priced.bound > 0 else 1.0
    if formulation == "block":
        variables, slack = _write_block(
            program, _narrow(layers, capacity, priced), capacity, group_size, scale
        )
    else:
        variables, slack = _write_literal(program, layers, capacity, group_size, scale), math.inf
    outcome = program.optimize(max_seconds=time_limit_s).name
    if outcome not in ("OPTIMAL", "FEASIBLE"):
        return priced
    states: tuple[State, ...] = tuple(_read_state(own) for own in variables)
    num_hot = fill(layers, states, capacity)
    value = _worth(layers, states, num_hot)
    if value < priced.value:
        states, num_hot, value = priced.states, priced.num_hot, priced.value
    bound = min(priced.bound, program.objective_bound / scale + slack)
    optimal = outcome == "OPTIMAL" or priced.status == "optimal"
    return Choice(states, num_hot, value, max(bound, value), "optimal" if optimal else "feasible")


def _new_program() -> Any:
    """An empty program that is maximised; None, with a warning, where python-mip cannot be used."""
    try:
        import mip

        program = mip.Model("placement", sense=mip.MAXIMIZE, solver_name=mip.CBC)
    # mip answers a missing or unloadable library with whatever comes first: ImportError, OSError,
    # NameError, AttributeError. None of them is a reason to have no placement.
    except Exception as error:
        warnings.warn(
            f"the solver python-mip cannot be used ({type(error).__name__}: {error}); neurons are placed "
            "by price instead. To get the best placement: pip install mip",
            stacklevel=5,
        )
        return None
    program.verbose = 0
    program.threads = 1  # more threads make the answer depend on timing
    program.seed = _SEED
    program.max_mip_gap = _MIP_GAP
    return program


def choose_by_price(layers: Sequence[LayerCurve], capacity: int) -> Choice:
    """The Lagrangian choice: every layer takes what is worth more than its bytes cost at one price.

        bound = min over p >= 0 of  p * capacity + sum of max over a layer's choices of (worth - p * bytes)

    bounds the worth of any choice (weak duality). The choice at the lowest price at which all fits is
    feasible; what is left is given to further neurons, and to closed layers that still fit.
    """
    price, bound = _find_price(layers, [_all_states(layer) for layer in layers], capacity)
    states: list[State] = [_best(layer, _all_states(layer), price)[0] for layer in layers]
    num_hot = fill(layers, states, capacity)
    left = capacity - _used(layers, num_hot)
    for i in sorted(range(len(layers)), key=lambda i: -layers[i].worth[layers[i].least]):
        layer = layers[i]
        if states[i] == "closed" and layer.least * layer.neuron_bytes <= left:
            states[i] = "open"
            left -= layer.least * layer.neuron_bytes
            num_hot = fill(layers, states, capacity)
            left = capacity - _used(layers, num_hot)
    value = _worth(layers, states, num_hot)
    proven = bound - value <= _EXACT * max(bound, 0.0)
    return Choice(tuple(states), tuple(num_hot), value, max(bound, value), "optimal" if proven else "greedy")


def fill(layers: Sequence[LayerCurve], states: Sequence[State], capacity: int) -> tuple[int, ...]:
    """The best numbers of hot neurons, given which layers are closed, open and whole.

    Exact where all neurons have as many bytes; else within one neuron of it.
    """
    fixed: list[tuple[State, ...]] = [(state,) for state in states]
    price, _ = _find_price(layers, fixed, capacity)
    num_hot = [_best(layer, own, price)[1] for layer, own in zip(layers, fixed, strict=True)]
    left = capacity - _used(layers, num_hot)

    def next_gain(i: int) -> float:
        return float(layers[i].gains[num_hot[i]]) / layers[i].neuron_bytes

    # Those of one price stand in several layers; then those that are smaller than what did not fit.
    can_grow = [i for i, state in enumerate(states) if state == "open" and num_hot[i] < layers[i].most]
    while can_grow and left:
        i = max(can_grow, key=next_gain)
        layer = layers[i]
        equal = layer.num_equal(num_hot[i])
        taken = min(equal, left // layer.neuron_bytes)
        num_hot[i] += taken
        left -= taken * layer.neuron_bytes
        if taken < equal or num_hot[i] == layer.most:
            can_grow.remove(i)
    return tuple(num_hot)


def _all_states(layer: LayerCurve) -> tuple[State, ...]:
    closed: tuple[State, ...] = ("closed",) if layer.least else ()
    whole: tuple[State, ...] = ("whole",) if layer.whole is not None else ()
    return (*closed, "open", *whole)


def _best(layer: LayerCurve, states: Sequence[State], price: float) -> tuple[State, int, float]:
    """Of some states the one with the most left of its worth at a price: (state, num_hot, what is left)."""
    options: list[tuple[State, int, float]] = []
    for state in states:
        num_hot, worth = 0, 0.0
        if state == "open":
            num_hot = layer.num_worth(price)
            worth = float(layer.worth[num_hot])
        elif state == "whole":
            num_hot, worth = layer.neurons, layer.whole or 0.0
        options.append((state, num_hot, worth - price * layer.neuron_bytes * num_hot))
    return max(options, key=lambda option: option[2])


def _find_price(
    layers: Sequence[LayerCurve], states: Sequence[Sequence[State]], capacity: int
) -> tuple[float, float]:
    """The lowest price of a byte at which the layers' best choices fit, and the least bound found."""
    high = 0.0
    for layer in layers:
        if layer.most:
            high = max(high, float(layer.gains.max()) / layer.neuron_bytes)
        if layer.whole is not None:
            high = max(high, layer.whole / (layer.neurons * layer.neuron_bytes))
    high *= 2  # where nothing is worth its bytes, rounding errors included
    low, bound, price = 0.0, math.inf, 0.0
    for _ in range(_HALVINGS):
        best = [_best(layer, own, price) for layer, own in zip(layers, states, strict=True)]
        bound = min(bound, price * capacity + math.fsum(left for _, _, left in best))
        fits = _used(layers, [num_hot for _, num_hot, _ in best]) <= capacity
        if fits and price == 0.0:
            return 0.0, bound
        low, high = (low, price) if fits else (price, high)
        price = (low + high) / 2
        if price in (low, high):
            break
    return high, bound


def _used(layers: Sequence[LayerCurve], num_hot: Sequence[int]) -> int:
    return sum(layer.neuron_bytes * num for layer, num in zip(layers, num_hot, strict=True))


def _worth(layers: Sequence[LayerCurve], states: Sequence[State], num_hot: Sequence[int]) -> float:
    return math.fsum(
        layer.whole or 0.0 if state == "whole" else float(layer.worth[num])
        for layer, state, num in zip(layers, states, num_hot, strict=True)
    )


def _narrow(
    layers: Sequence[LayerCurve], capacity: int, priced: Choice
) -> list[tuple[LayerCurve, tuple[State, ...]]]:
    """Each layer with the states and numbers of hot neurons that something better than `priced` can have.

    At a price whose bound is `slack` above `priced`, a layer's choice that leaves more than `slack` less
    than its best one does is part of nothing better: the bound would fall by as much.
    """
    price, _ = _find_price(layers, [_all_states(layer) for layer in layers], capacity)
    best = [_best(layer, _all_states(layer), price)[2] for layer in layers]
    # Rounding must not remove what is as good.
    slack = price * capacity + math.fsum(best) - priced.value + _EXACT * priced.bound
    narrowed = []
    for layer, most_left in zip(layers, best, strict=True):
        states = tuple(s for s in _all_states(layer) if most_left - _best(layer, (s,), price)[2] <= slack)
        if "open" in states:
            left = layer.worth - price * layer.neuron_bytes * np.arange(layer.most + 1)
            useful = np.flatnonzero(left[layer.least :] >= most_left - slack) + layer.least
            layer = dataclasses.replace(layer, gains=layer.gains[: useful[-1]], least=int(useful[0]))
        narrowed.append((layer, states))
    return narrowed


def _read_state(variables: dict[State, Any]) -> State:
    for state, variable in variables.items():
        if variable.x > 0.5:
            return state
    return "closed"


def _write_block(
    program: Any,
    layers: Sequence[tuple[LayerCurve, tuple[State, ...]]],
    capacity: int,
    group_size: int,
    scale: float,
) -> tuple[list[dict[State, Any]], float]:
    """Writes the block form; returns each layer's variables by state, and what groups can hide.

    Groups have their mean gain, and more lies in the first part of one: a layer, of which one group at most
    is cut, is worth at most the largest such difference more than the program knows. With it the solver's
    bound holds for single neurons.
    """
    import mip

    unit = math.gcd(*(layer.neuron_bytes for layer, _ in layers))
    used, variables, slack = [], [], 0.0
    for layer, states in layers:
        weight = layer.neuron_bytes // unit
        options: dict[State, Any] = {
            "open": (layer.least, layer.worth[layer.least]),
            "whole": (layer.neurons, layer.whole),
        }
        own: dict[State, Any] = {}
        for state in states:
            if state != "closed":
                num_hot, worth = options[state]
                own[state] = program.add_var(var_type=mip.BINARY, obj=scale * float(worth))
                used.append(num_hot * weight * own[state])
        total: Any = mip.xsum(own.values())
        program += total <= 1 if "closed" in states else total == 1
        variables.append(own)
        edges = np.arange(layer.least, layer.most, group_size)
        if "open" in own and len(edges):
            gains, sizes = np.add.reduceat(layer.gains, edges), np.diff(edges, append=layer.most)
            parts = [program.add_var(ub=1, obj=scale * float(gain)) for gain in gains]
            used += [int(size) * weight * part for size, part in zip(sizes, parts, strict=True)]
            program += mip.xsum(parts) <= len(parts) * own["open"]
            means = np.repeat(gains / sizes, sizes)
            slack += max(0.0, float(np.cumsum(layer.gains[layer.least :] - means).max()))
    total_used: Any = mip.xsum(used)
    program += total_used <= capacity // unit
    return variables, slack


def _write_literal(
    program: Any, layers: Sequence[LayerCurve], capacity: int, group_size: int, scale: float
) -> list[dict[State, Any]]:
    """Writes equations 6 to 8 of the paper, a binary variable a group; its bound is for whole groups only."""
    import mip

    unit = math.gcd(*(layer.neuron_bytes for layer in layers))
    used, variables = [], []
    for layer in layers:
        if not layer.most:
            variables.append({})
            continue
        is_open = program.add_var(var_type=mip.BINARY)
        edges = np.arange(0, layer.most, group_size)
        gains = np.add.reduceat(layer.gains, edges)
        sizes = [int(size) for size in np.diff(edges, append=layer.most)]
        hot = [program.add_var(var_type=mip.BINARY, obj=scale * float(gain)) for gain in gains]
        count = mip.xsum(size * group for size, group in zip(sizes, hot, strict=True))
        program += count >= layer.least * is_open
        program += count <= layer.most * is_open
        used += [layer.neuron_bytes // unit * size * group for size, group in zip(sizes, hot, strict=True)]
        variables.append({"open": is_open})
    total_used: Any = mip.xsum(used)
    program += total_used <= capacity // unit
    return variables
