"""Kinds of gradients are told apart by more than round-off."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpnorm.vectors import distinct


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(-1e-15, 1e-15)), min_size=1))
def test_round_off_makes_no_kind(drawn):
    gradients = [torch.tensor([n, -n], dtype=torch.float64) * (1 + noise) for n, noise in drawn]
    kinds = distinct(gradients, 1e-13)
    assert len(kinds) == len({n for n, _ in drawn})
    assert kinds[0] is gradients[0]


def test_zero_is_of_its_own_kind():
    zero, tiny = torch.zeros(2), torch.full((2,), 1e-30)
    assert len(distinct([zero, tiny, zero, tiny], 1e-13)) == 2
