"""Ownership of rows, against its definition and against what verl really deals out."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpnorm import verl_layout
from cpnorm.layout import alignment, contiguous, owners, padded, zigzag

SIZES = st.integers(1, 128)
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple)
HAS_CONTIGUOUS = verl_layout.util._PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE


@given(LENGTHS, SIZES, st.integers(1, 8), st.sampled_from(("zigzag", "contiguous")))
@settings(max_examples=60)
def test_every_row_has_one_owner(lengths, C, tp, layout):
    own = owners(lengths, C, tp, layout)
    assert own.shape == (C, sum(lengths))
    assert torch.equal(own.sum(0), torch.ones(sum(lengths), dtype=torch.long))


@given(SIZES, st.integers(1, 4))
def test_zigzag_read_backwards_is_zigzag(C, size):
    length = 2 * C * size
    rows = [zigzag(length, C, c) for c in range(C)]
    assert torch.equal(torch.cat(rows).sort().values, torch.arange(length))
    for mine in rows:
        assert torch.equal(mine, (length - 1 - mine).flip(0))


@given(SIZES, st.integers(1, 4))
def test_contiguous_rows_follow_each_other(C, size):
    rows = torch.cat([contiguous(C * size, C, c) for c in range(C)])
    assert torch.equal(rows, torch.arange(C * size))


@given(st.integers(0, 1000), SIZES, st.integers(1, 8), st.sampled_from(("zigzag", "contiguous")))
def test_padding_is_the_least_that_fits(length, C, tp, layout):
    align = alignment(C, tp, layout)
    assert align == tp * C * (2 if layout == "zigzag" and C > 1 else 1)
    assert padded(length, C, tp, layout) % align == 0
    assert 0 <= padded(length, C, tp, layout) - length < align


@given(LENGTHS, st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=30)
def test_zigzag_is_what_verl_deals_out(lengths, C, tp):
    assert torch.equal(owners(lengths, C, tp), verl_layout.owners(lengths, C, tp))


def test_zigzag_is_what_verl_deals_out_to_128_ranks():
    lengths = (1, 300, 77)
    assert torch.equal(owners(lengths, 128), verl_layout.owners(lengths, 128))


@given(LENGTHS, st.integers(1, 6), st.integers(1, 3))
@settings(max_examples=15)
def test_verl_gathers_all_values_and_the_gradient_of_the_own_rows(lengths, C, tp):
    _check_gather(lengths, C, tp, "zigzag")


@given(LENGTHS, st.integers(1, 8), st.integers(1, 3))
@settings(max_examples=15)
def test_contiguous_is_what_verl_deals_out_and_gathers(lengths, C, tp):
    """Where Megatron-Core has no `cp_partition_mode` yet, an object of any fields stands in."""
    fields = {"_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE": True, "PackedSeqParams": SimpleNamespace}
    with nullcontext() if HAS_CONTIGUOUS else mock.patch.multiple(verl_layout.util, **fields):
        own = owners(lengths, C, tp, "contiguous")
        assert torch.equal(own, verl_layout.owners(lengths, C, tp, "contiguous"))
        _check_gather(lengths, C, tp, "contiguous")


@pytest.mark.skipif(HAS_CONTIGUOUS, reason="this Megatron-Core has cp_partition_mode")
def test_verl_refuses_contiguous_on_an_older_megatron():
    with pytest.raises(ValueError, match=r"requires PackedSeqParams\.cp_partition_mode"):
        verl_layout.owners((5, 9), 2, 1, "contiguous")


def _check_gather(lengths, C, tp, layout):
    """Each rank computes the same values; the weights of a linear loss come back as gradient."""
    values = torch.randn(sum(lengths), dtype=torch.float64)
    rows = values.repeat(C, 1).requires_grad_()
    seen = verl_layout.gathered(rows, lengths, C, tp, layout)
    assert torch.equal(seen, values.expand(C, -1))
    weights = torch.randn(C, sum(lengths), dtype=torch.float64)
    (seen * weights).sum().backward()
    assert torch.equal(rows.grad, weights * owners(lengths, C, tp, layout))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zigzag(6, 2, 0), "length is 6, allowed is a multiple of 4"),
        (lambda: zigzag(8, 2, 2), "c is 2 of C = 2 ranks, allowed is 0 <= c < C"),
        (lambda: zigzag(8, 0, 0), "c is 0 of C = 0 ranks, allowed is 0 <= c < C"),
        (lambda: contiguous(7, 2, 0), "length is 7, allowed is a multiple of 2"),
        (lambda: contiguous(8, 2, -1), "c is -1 of C = 2 ranks, allowed is 0 <= c < C"),
        (lambda: alignment(0), "C is 0 and tp is 1, allowed is 1 or more"),
        (lambda: alignment(2, 0), "C is 2 and tp is 0, allowed is 1 or more"),
        (lambda: alignment(2, 1, "ring"), "layout is 'ring', allowed is zigzag, contiguous"),
        (lambda: owners((), 2), "lengths is (), allowed is at least one length, each 1 or more"),
        (lambda: owners((3, 0), 2), "lengths is (3, 0), allowed is at least one length"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011, the message is compared below
        call()
    assert str(error.value).startswith(message)
