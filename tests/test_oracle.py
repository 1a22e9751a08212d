"""The oracle's losses: hand-computed values, the papers' forms, and verl's functions."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from cpnorm import oracle
from cpnorm.batch import batch
from cpnorm.case import Case, Sequence, modes
from cpnorm.check import tolerance, unsharded
from strategies import cases

SIX = tuple(Sequence(2, n) for n in (1, 2, 3, 4, 5, 6))


@given(cases(names=tuple(oracle.LOSSES), dtypes=("float64",)))
@settings(max_examples=80)
def test_oracle_agrees_with_verl_unsharded(case):
    whole = replace(case, dp=1, cp=1, tp=1, micro_batch_size=case.B)
    reference = unsharded(whole)
    J, gradient = oracle.objective(case)
    scale = max(float(J.abs()), float(gradient.abs().max()), 1e-30)
    assert float((J - reference.value).abs()) <= tolerance("float64") * scale
    assert float((gradient - reference.gradient).abs().max()) <= tolerance("float64") * scale


@pytest.mark.parametrize("mode", modes())
def test_aggregation_by_hand(mode):
    case = Case(
        sequences=(Sequence(1, 2), Sequence(1, 4, (1, 0, 1, 1)), Sequence(1, 1, (0,))),
        mode=mode,
        loss_scale_factor=10,
    )
    losses = [torch.tensor(x, dtype=torch.float64) for x in ([1.0, 2.0], [4.0, 5.0, 6.0], [])]
    expected = {
        "token-mean": 18 / 5,
        "token-sum": 18,
        "seq-mean-token-sum": 18 / 3,
        "seq-mean-token-mean": (1.5 + 5) / 3,
        "seq-mean-token-sum-norm": 18 / 3 / 10,
    }
    assert float(oracle.aggregate(losses, case)) == pytest.approx(expected[mode], rel=1e-15)


def test_gspo_token_form_has_the_gradient_of_the_papers_sequence_form():
    case = Case(sequences=SIX, loss="gspo", clip=False, seed=3)
    data = batch(case)
    one_advantage = data.advantages[:, :1].expand_as(data.advantages)
    data = replace(data, advantages=one_advantage)
    with mock.patch.object(oracle, "batch", return_value=data):
        J, gradient = oracle.objective(case)
    rows = data.rows.clone().requires_grad_()
    expected, start = 0, 0
    for s, seq in enumerate(SIX):
        new = rows[start + 1 : start + 1 + seq.response]
        ratio = (new - data.old[s, : seq.response]).mean().exp()
        expected = expected - ratio * one_advantage[s, 0] / case.B
        start += seq.length
    torch.testing.assert_close(J, expected.detach(), rtol=1e-14, atol=0)
    expected_gradient = torch.autograd.grad(expected, rows)[0]
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-13, atol=0)


def test_ppo_by_hand():
    """Ratios 2 and 1/2 with bounds 0.2: clipped where the advantage asks for more."""
    case = Case(sequences=(Sequence(1, 1),), loss="vanilla", clip_low=0.2, clip_high=0.2)
    for log_ratio, advantage, expected in [
        (2.0, 1.0, -1.2),
        (2.0, -1.0, 2.0),
        (0.5, 1.0, -0.5),
        (0.5, -1.0, 0.8),
        (5.0, -1.0, 3.0),
    ]:
        new = torch.tensor([log_ratio], dtype=torch.float64).log()
        loss = oracle.vanilla(new, torch.zeros(1), torch.tensor([advantage]), case)
        assert float(loss) == pytest.approx(expected, rel=1e-14)


def test_the_batch_depends_on_no_topology():
    case = Case(sequences=SIX, seed=9)
    other = replace(case, dp=3, cp=4, tp=2, micro_batch_size=2, loss="vanilla")
    for one, two in zip(vars(batch(case)).values(), vars(batch(other)).values(), strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(batch(case).rows, batch(replace(case, seed=10)).rows)
    assert batch(replace(case, dtype="float32")).rows.dtype == torch.float32


def test_a_mode_that_is_not_written_here():
    with pytest.raises(ValueError, match="mode is 'mean', allowed in the oracle is token-mean, "):
        oracle.objective(Case(sequences=SIX, mode="mean"))


def test_a_loss_that_is_not_written_here():
    case = Case(sequences=SIX, loss="sapo")
    with pytest.raises(ValueError, match="loss is 'sapo', allowed in the oracle is gspo, vanilla"):
        oracle.objective(case)
