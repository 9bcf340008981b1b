"""Generators are put back, and their states compared."""

import random

import numpy
import pytest
import torch

from lightning_ptdp.generators import HostState, drawing_from, kept, states_of

DRAWS = {
    "python": random.random,
    "numpy": numpy.random.rand,
    "numpy's second normal": numpy.random.randn,
}


def test_kept_generators_stand_where_they_stood():
    (state,) = states_of([torch.default_generator])
    with kept([torch.default_generator]):
        torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state[1])


def test_draws_repeat_and_the_present_goes_on():
    states = states_of([torch.default_generator])
    first, second = torch.rand(2), torch.rand(2)
    with drawing_from(states):
        assert torch.equal(torch.rand(4), torch.cat([first, second]))
    assert not torch.equal(torch.rand(2), first)


def test_generators_are_put_back_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="invalid for input of size"), kept([torch.default_generator]):
        torch.rand(2).view(torch.randint(3, 4, ()))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_seen_and_undone(draw):
    before = HostState()
    assert HostState() == before
    first = draw()
    assert HostState() != before
    before.go_back()
    assert HostState() == before
    assert draw() == first
