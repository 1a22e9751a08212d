"""The CP attention against plain causal attention, its collectives on one process or on ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpnorm.engine.attention import causal, packed_rows
from cpnorm.layout import alignment, padded
from cpnorm.ranks import World
from engine_functions import attention_on_rank, dot_product_attention, gather_rows_on_rank

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def starts(lengths, C):
    return torch.tensor([0, *(padded(n, C) for n in lengths)]).cumsum(0).to(torch.int32)


@given(LENGTHS, st.integers(1, 8))
def test_ranks_hold_every_packed_row_once(lengths, C):
    ends = starts(lengths, C)
    rows = torch.cat([packed_rows(ends, C, c) for c in range(C)])
    assert torch.equal(rows.sort().values, torch.arange(int(ends[-1])))


@given(LENGTHS, st.integers(1, 4))
def test_a_row_sees_its_own_sequence_up_to_itself(lengths, C):
    ends = starts(lengths, C)
    everything = torch.arange(int(ends[-1]))
    seen = causal(everything, everything, ends)
    blocks = [torch.ones(n, n).tril() for n in ends.diff().tolist()]
    assert torch.equal(seen, torch.block_diag(*blocks).bool())


@pytest.fixture(scope="module")
def world():
    with World(4, timeout=60) as four:
        yield four


@pytest.mark.parametrize("C", [1, 2, 4])
def test_sharded_attention_is_causal_attention(world, C):
    """Output rows and the gradients by query, key and value, against one process without CP."""
    lengths, heads, groups, dim = (5, 19, 1, 8), 4, 2, 8
    ends = starts(lengths, 4)  # a multiple of every alignment up to CP 4
    assert all(alignment(C) <= alignment(4) for C in (1, 2, 4))
    g = torch.Generator().manual_seed(5)
    rows = int(ends[-1])
    shapes = [(rows, heads, dim), (rows, groups, dim), (rows, groups, dim), (rows, heads * dim)]
    q, k, v, weight = (torch.randn(*s, generator=g, dtype=torch.float64) for s in shapes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = causal(torch.arange(rows), torch.arange(rows), ends)
    scores = torch.einsum("qhd,khd->hqk", leaves[0], leaves[1].repeat_interleave(2, 1)) / dim**0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, leaves[2].repeat_interleave(2, 1)).flatten(1)
    expected = [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]
    found = [torch.full_like(x, torch.nan) for x in expected]
    for one in world.run(attention_on_rank, 4 // C, C, q, k, v, weight, ends):
        for whole, part in zip(found, one[1:], strict=True):
            whole[one[0]] = part
    for whole, want in zip(found, expected, strict=True):
        torch.testing.assert_close(whole, want, rtol=1e-12, atol=1e-13)


def test_backward_of_the_gather_is_its_adjoint(world):
    """<gather(x), y> summed over ranks is <x, backward(y)>, for each rank's own y."""
    for left, right in world.run(gather_rows_on_rank):
        assert left == pytest.approx(right, rel=1e-13)


def test_contiguous_rows_are_one_interval():
    ends = torch.tensor([0, 8, 16], dtype=torch.int32)
    assert packed_rows(ends, 2, 1, "contiguous").tolist() == list(range(8, 16))


def test_without_cp_it_is_megatrons_own():
    g = torch.Generator().manual_seed(7)
    shapes = [(19, 4, 8), (19, 2, 8), (19, 2, 8)]
    q, k, v = (torch.randn(*s, generator=g, dtype=torch.float64) for s in shapes)
    with World(1) as one:
        ((theirs, ours),) = one.run(dot_product_attention, q, k, v)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
