"""Means over a rank's own share: their exact error, when it vanishes, and verl's losses with it."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpnorm import check, mutants, oracle
from cpnorm.batch import batch
from cpnorm.case import Case, Sequence
from cpnorm.check import tolerance
from cpnorm.layout import owners, padded
from cpnorm.local_means import (
    factors,
    local_loss,
    on_rank,
    parameter_gradients,
    row_gradients,
    shares,
)
from cpnorm.losses import columns, micro_batch
from cpnorm.transformer import Model
from cpnorm.vectors import angle
from strategies import cases, sequences

matplotlib.use("agg")

FRACTIONS = st.fractions(-9, 9, max_denominator=9)
OWNERS = st.integers(1, 6).flatmap(
    lambda C: st.tuples(st.just(C), st.lists(st.integers(0, C - 1), min_size=1, max_size=12))
)
"""C, and the rank that owns each counted token of a sequence."""


def local_means(C, owner, losses):
    """The mean loss of every rank's tokens, from the definition; 0 for a rank without a token."""
    parts = [[x for x, k in zip(losses, owner, strict=True) if k == c] for c in range(C)]
    return [sum(part) / Fraction(len(part)) if part else Fraction(0) for part in parts]


def weights(C, owner):
    """What each token weighs in the sum of local means: its value when it alone has loss 1."""
    units = np.eye(len(owner), dtype=int).tolist()
    return [sum(local_means(C, owner, unit)) for unit in units]


def shares_of(C, owner):
    return tuple(Counter(owner)[c] for c in range(C))


@given(OWNERS)
def test_weights_are_the_factors(drawn):
    C, owner = drawn
    factor = factors(shares_of(C, owner))
    n = len(owner)
    assert [weight * n / C for weight in weights(C, owner)] == [factor[k] for k in owner]


@given(OWNERS)
def test_right_if_and_only_if_shares_are_equal_or_one_rank_has_all(drawn):
    C, owner = drawn
    n, share, weight = len(owner), shares_of(C, owner), weights(C, owner)
    assert all(x / C == Fraction(1, n) for x in weight) == (len(set(share)) == 1)
    assert all(x == Fraction(1, n) for x in weight) == (n in share)


@given(st.integers(1, 6), st.integers(1, 4))
def test_right_with_equal_shares(C, each):
    owner = [c for c in range(C) for _ in range(each)]
    assert {x / C for x in weights(C, owner)} == {Fraction(1, C * each)}


@given(OWNERS)
def test_a_sequence_weighs_as_many_times_as_ranks_have_some_of_it(drawn):
    C, owner = drawn
    assert sum(weights(C, owner)) == len(set(owner))


@given(OWNERS, st.data())
def test_error_is_minus_the_covariance_of_share_and_mean(drawn, data):
    C, owner = drawn
    losses = data.draw(st.lists(FRACTIONS, min_size=len(owner), max_size=len(owner)))
    n, share, mean = len(owner), shares_of(C, owner), local_means(C, owner, losses)
    middle = Fraction(sum(mean), C)
    pairs = zip(share, mean, strict=True)
    covariance = sum((k - Fraction(n, C)) * (m - middle) for k, m in pairs) / C
    assert middle - Fraction(sum(losses), n) == -Fraction(C, n) * covariance


@given(st.lists(OWNERS, min_size=1, max_size=3))
def test_direction_is_right_if_and_only_if_all_lie_evenly_on_as_many_ranks(batch_of_owners):
    C = max(C for C, _ in batch_of_owners)
    scale = {weight * len(owner) for _, owner in batch_of_owners for weight in weights(C, owner)}
    spread = set()
    for _, owner in batch_of_owners:
        filled = [k for k in shares_of(C, owner) if k]
        spread |= {(len(filled), len(set(filled)))}
    even = len(spread) == 1 and spread == {(next(iter(spread))[0], 1)}
    assert (len(scale) == 1) == even
    if even:
        assert scale == {next(iter(spread))[0]}


@given(sequences(30), st.integers(1, 9), st.integers(1, 3))
def test_shares_add_up_and_are_those_of_the_owners(sequence, C, tp):
    found = shares(sequence, C, tp)
    counted = [sequence.prompt - 1 + j for j, one in enumerate(sequence.counted) if one]
    owner = owners((sequence.length,), C, tp).int().argmax(0)[counted].tolist()
    assert found == shares_of(C, owner)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("C", [3, 4, 5, 6])
def test_zigzag_shares_are_equal_only_behind_a_prompt_of_one_token(C, tp):
    longest = 5 * 2 * C * tp
    even = {
        (prompt, response)
        for prompt in range(1, longest)
        for response in range(1, longest - prompt + 1)
        if len(set(shares(Sequence(prompt, response), C, tp))) == 1
    }
    assert even == {(1, C * tp), (1, 2 * C * tp)}


@given(st.integers(1, 60), st.integers(1, 400), st.integers(2, 9), st.integers(1, 2))
@settings(max_examples=200)
def test_zigzag_factors_by_chunks(prompt, response, C, tp):
    rows = padded(prompt + response, C, tp)
    chunk, before = rows // (2 * C), prompt - 1
    behind = rows - before - response
    share = shares(Sequence(prompt, response), C, tp)
    factor = factors(share)
    assert sum(k > 0 for k in share) <= -(-(response - 1) // chunk) + 1
    if max(before, behind) <= (C - 1) * chunk:
        assert factor[C - 1] == Fraction(response, rows) == min(f for f in factor if f)
        if before >= chunk and share[0]:
            assert factor[0] > 2 * factor[C - 1]


@given(cases(names=("vanilla", "gspo"), dtypes=("float64",), layout="zigzag"))
@settings(max_examples=60)
def test_verls_losses_on_local_shares_are_the_papers_on_parts(case):
    """The oracle's token losses of each rank's tokens, aggregated as the mode says."""
    case = replace(case, loss_scale_factor=case.loss_scale_factor or 7, rollout_weights=False)
    data, total, start = batch(case), 0, 0
    rows = data.rows.clone().requires_grad_()
    for s, sequence in enumerate(case.sequences):
        end = sequence.prompt - 1 + sequence.response
        new = rows[start : start + sequence.length][sequence.prompt - 1 : end]
        whole = (new, data.old[s, : len(new)], data.advantages[s, : len(new)])
        for own in owners((sequence.length,), case.C, case.tp)[:, sequence.prompt - 1 : end]:
            mine = own & torch.tensor(sequence.counted, dtype=torch.bool)
            losses = oracle.LOSSES[case.loss](*(x[mine] for x in whole), case)
            total = total + oracle.aggregate([losses], case) / case.C
        start += sequence.length
    found = local_loss(case, data, rows)
    (want,), (got,) = (torch.autograd.grad(x, rows) for x in (total, found))
    largest = max(float(want.abs().max()), 1e-30)
    assert float((got - want).abs().max()) <= tolerance("float64") * largest
    scale = max(largest, float(total.detach().abs()))
    assert float((found - total).detach().abs()) <= tolerance("float64") * scale


@given(cases(dtypes=("float64",), names=("vanilla", "gspo", "gpg", "dro", "cispo"), cp=1))
@settings(max_examples=20)
def test_on_one_rank_nothing_is_wrong(case):
    whole, local = row_gradients(case)
    reference = check.unsharded(case).gradient
    assert torch.equal(whole, local)
    largest = max(float(reference.abs().max()), 1e-30)
    assert float((local - reference).abs().max()) <= tolerance("float64") * largest


CASE = Case(
    sequences=(Sequence(3, 5), Sequence(4, 9, (1, 1, 1, 0, 0, 1, 1, 0, 1)), Sequence(20, 40)),
    cp=4,
    clip_low=0.05,
    clip_high=0.1,
)


@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_slicing_the_rows_is_masking_them(loss):
    case = replace(CASE, loss=loss)
    with mutants.local_means():
        _, masked, _ = check.sharded(case, "sum")
    _, local = row_gradients(case)
    deviation = float((masked.sum(0) / case.C - local).abs().max())
    assert deviation <= tolerance("float64") * float(local.abs().max())


def test_a_rank_keeps_its_own_tokens_in_order():
    case = replace(CASE, micro_batch_size=3, rollout_weights=True)
    data = batch(case)
    micro = micro_batch(case, data, range(3))
    own = owners(micro.lengths, case.C)
    new = columns(data.rows[micro.rows], micro)
    for mine in own:
        local, kept = on_rank(micro, new, mine)
        for s in range(3):
            at = columns(mine.long(), micro)[s].bool()
            for part, table in (
                (kept, new),
                (local.old, micro.old),
                (local.advantages, micro.advantages),
                (local.weights, micro.weights),
                (local.mask, micro.mask),
            ):
                assert torch.equal(part[s, : at.sum()], table[s, at])
            assert not local.mask[s, at.sum() :].any()


def test_equal_shares_leave_gspos_ratio_wrong():
    """A prompt of one token and 4 or 8 of response: every rank of 4 has as many."""
    case = Case(sequences=(Sequence(1, 4), Sequence(1, 8)), cp=4, clip=False)
    assert {f for s in case.sequences for f in factors(shares(s, 4))} == {1}
    degrees = {
        loss: angle(*row_gradients(replace(case, loss=loss))) for loss in ("vanilla", "gspo")
    }
    assert degrees["vanilla"] <= np.degrees(tolerance("float64"))
    assert degrees["gspo"] > 1


def test_parameters_are_right_on_one_rank_and_wrong_on_four():
    model = Model(layers=1)
    right, alone = parameter_gradients(replace(CASE, cp=1), model)
    same, local = parameter_gradients(CASE, model)

    def deviation(gradients):
        return max(float((gradients[name] - right[name]).abs().max()) for name in right)

    largest = max(float(x.abs().max()) for x in right.values())
    assert deviation(same) == 0
    assert deviation(alone) <= tolerance("float64") * largest
    assert deviation(local) > 0.1 * largest


@pytest.mark.parametrize("degrees", [0.0, 1e-9, 30.0, 90.0, 180.0])
def test_angle(degrees):
    turn = torch.tensor(np.radians(degrees), dtype=torch.float64)
    x, y = torch.tensor([2.0, 0.0], dtype=torch.float64), 3 * torch.stack([turn.cos(), turn.sin()])
    assert angle(x, y) == pytest.approx(degrees, rel=1e-12, abs=1e-13)


def test_the_picture_shows_every_rank_and_the_extremes():
    from cpnorm.figures.local_means import balance

    figure = balance(5, (2, 3, 40), (2, 4))
    above, below = figure.axes[:2]
    drawn = np.ma.filled(above.collections[0].get_array(), np.nan).reshape(4, 3)
    for column, response in enumerate((2, 3, 40)):
        for row, f in enumerate(factors(shares(Sequence(5, response), 4))):
            expected = np.nan if f is None else np.log2(float(f))
            np.testing.assert_allclose(drawn[row, column], expected)
    largest, smallest = below.lines[2].get_ydata(), below.lines[3].get_ydata()
    last = [f for f in factors(shares(Sequence(5, 40), 4)) if f]
    assert (largest[-1], smallest[-1]) == (float(max(last)), float(min(last)))
