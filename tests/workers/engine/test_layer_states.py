"""The bounded cache of hidden states: which states stay, which are evicted, and the bound itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moevolve.workers.engine.reuse import LayerStates

CPU = torch.device("cpu")


def state(value: float = 0.0) -> Tensor:
    """A state of 1,000 bytes."""
    return torch.full((250,), float(value))


def kept(states: LayerStates, name: str, places: int = 3) -> list[int]:
    return [i for i in range(places) if states.get(name, bytes([i]), CPU) is not None]


def offer(states: LayerStates, name: str, layers: int, places: int = 3) -> None:
    """Run a candidate with one prefix through all its batches."""
    states.count({name: layers})
    for i in range(places):
        states.put(name, bytes([i]), state(i))


def test_states_come_back_as_they_were_put() -> None:
    states = LayerStates(10_000)
    offer(states, "a", 1)
    for i in range(3):
        found = states.get("a", bytes([i]), CPU)
        assert found is not None and torch.equal(found, state(i))
    assert states.get("a", bytes([3]), CPU) is None and states.get("b", bytes([0]), CPU) is None
    assert states.nbytes == 3_000
    offer(states, "a", 1)
    assert states.nbytes == 3_000, "the same state is kept once"


def test_newer_or_deeper_states_displace_older_or_shallower_ones() -> None:
    states = LayerStates(3_500)
    offer(states, "a", 1)
    offer(states, "b", 1)
    assert (kept(states, "a"), kept(states, "b")) == ([], [0, 1, 2])
    states = LayerStates(3_500)
    offer(states, "deep", 3)
    offer(states, "b", 1)
    assert (kept(states, "deep"), kept(states, "b")) == ([0, 1, 2], [])


def test_what_comes_again_outlives_what_came_once() -> None:
    states = LayerStates(6_000)
    for i in range(20):
        offer(states, "parent", 2)
        offer(states, f"child {i}", 3)
    assert kept(states, "parent") == [0, 1, 2]
    for i in range(300):
        offer(states, f"later {i}", 2)
    assert kept(states, "parent") == [], "but not for ever"


def test_the_bound_holds_and_a_state_beyond_it_is_not_kept() -> None:
    rng = np.random.default_rng(0)
    states = LayerStates(7_300)
    for _ in range(200):
        name, layers = f"{rng.integers(12)}", int(rng.integers(1, 4))
        offer(states, name, layers, places=int(rng.integers(1, 5)))
        assert 0 < states.nbytes <= 7_300
    small = LayerStates(999)
    offer(small, "a", 1)
    assert small.nbytes == 0
