"""verl's registered losses on every context-parallel rank against the unsharded loss."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, CriticConfig
from verl.workers.utils.losses import value_loss

from cpnorm.batch import batch
from cpnorm.case import Case, Sequence, losses, modes
from cpnorm.check import check, gather, per_rank, sharded, tolerance, unsharded
from cpnorm.layout import owners
from cpnorm.losses import (
    actor_config,
    columns,
    full_loss,
    micro_batch,
    policy_loss,
    registered_losses,
    row_index,
    tensor_dict,
)
from cpnorm.sweep import column, full_sweep, sweep, tabulate
from strategies import cases, sequences

SWEEP = full_sweep()
BASE = next(c for c in SWEEP if c.loss == "vanilla" and c.cp == 4)
CLIPPED = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "clip_cov", "geo_mean", "cispo", "bypass_mode")


def one_micro_batch(case):
    """The whole batch of `case` as one micro-batch, its data and its rows' owners."""
    data = batch(case)
    micro = micro_batch(case, data, range(case.B))
    return data, micro, owners(micro.lengths, case.C, case.tp, case.layout)


def largest(x, relative_to):
    return float(x.abs().max() / relative_to.abs().max())


# Names


def test_names_are_the_registrys():
    assert registered_losses() == losses()


def test_modes_are_those_that_verl_accepts():
    fixed = {"strategy": "megatron", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    for mode in modes():
        ActorConfig(loss_agg_mode=mode, **fixed)
    with pytest.raises(ValueError, match="Invalid loss_agg_mode"):
        ActorConfig(loss_agg_mode="another", **fixed)


def test_the_sweep_is_complete():
    seen = {(c.loss, c.mode, c.cp, c.clip, c.rollout_weights) for c in SWEEP}
    sizes = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128)
    options = (True, False), (True, False)
    assert seen == set(itertools.product(registered_losses(), modes(), sizes, *options))
    assert all(c.D == 2 and c.M == 2 for c in SWEEP)


# Every rank


@pytest.mark.parametrize("loss", losses())
def test_every_rank_agrees(loss):
    records = sweep(c for c in SWEEP if c.loss == loss and c.cp in (1, 3, 8))
    assert len(records) == 6 * 4 * 3
    assert all(r.passed for r in records)
    assert {column(r.case) for r in records} == {name for _, name in tabulate(records)}


@given(cases())
@settings(max_examples=150)
def test_every_rank_agrees_in_any_case(case):
    if case.loss == "bypass_mode":  # refuses a micro-batch without a counted token, see below
        seqs = tuple(replace(s, mask=None) for s in case.sequences)
        case = replace(case, sequences=seqs)
    record = check(case)
    assert record.passed, record
    assert record.ranks == case.D * case.C


@given(cases(dtypes=("float64",)))
@settings(max_examples=60)
def test_one_call_for_all_ranks_is_as_good_as_one_each(case):
    if case.loss == "bypass_mode":
        case = replace(case, sequences=tuple(replace(s, mask=None) for s in case.sequences))
    copies = unsharded(case).copies
    value, gradient, own = sharded(case, copies)
    one_value, one_gradient, one_own = sharded(case, "neither")
    scale = max(float(one_gradient.abs().max()), float(one_value.abs().max()), 1e-30)
    assert float((value - one_value).abs().max()) <= tolerance("float64") * scale
    assert float((gradient - one_gradient).abs().max()) <= tolerance("float64") * scale
    assert torch.equal(own, one_own)


def test_bfloat16_is_measured_and_not_judged():
    """Where what is additive is told by float64: 352 % of an error would pass for rounding."""
    case = replace(BASE, loss="geo_mean", dtype="bfloat16")
    record, exact = check(case), unsharded(replace(case, dtype="float64"))
    assert record.error < 0.1
    assert (record.additive, unsharded(case).copies) == (exact.additive, exact.copies)
    assert not record.additive
    with pytest.raises(ValueError, match="dtype is 'bfloat16', allowed for a verdict is float64"):
        assert record.passed


def test_gather_keeps_values_and_the_own_gradient():
    rows = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    own = torch.rand(3, 7) > 0.5
    seen = gather(rows, own)
    assert torch.equal(seen, rows)
    (seen**2).sum().backward()
    assert torch.equal(rows.grad, torch.where(own, 2 * rows.detach(), 0.0))


@given(st.lists(sequences(), min_size=1, max_size=5))
@settings(max_examples=40)
def test_rows_of_response_tokens(seqs):
    """Row prompt - 1 + j belongs to response token j."""
    index = row_index(tuple(s.prompt for s in seqs), tuple(s.response for s in seqs))
    start = 0
    for line, s in zip(index.tolist(), seqs, strict=True):
        first = start + s.prompt - 1
        tokens = [1 + first + j for j in range(s.response)]
        assert line == tokens + [0] * (len(line) - len(tokens))
        start += s.length


@pytest.mark.parametrize("loss", CLIPPED)
def test_clipping_bites(loss):
    on, off = (unsharded(replace(BASE, loss=loss, clip=clip)).gradient for clip in (True, False))
    assert not torch.equal(on, off)
    assert torch.count_nonzero(on) > 0


@pytest.mark.parametrize("loss", losses())
def test_rollout_weights_bite(loss):
    on, off = (
        unsharded(replace(BASE, loss=loss, rollout_weights=w)).gradient for w in (True, False)
    )
    assert not torch.equal(on, off)


# The direct call is what verl's engine calls


@pytest.mark.parametrize("loss", losses())
@pytest.mark.parametrize("weights", [False, True])
def test_direct_call_equals_ppo_loss(loss, weights):
    for mode in modes():
        case = replace(BASE, loss=loss, mode=mode, loss_scale_factor=7, rollout_weights=weights)
        data, micro, own = one_micro_batch(case)
        config = actor_config(case)
        rows = data.rows.clone().requires_grad_()
        seen = gather(rows, own[1])
        direct = policy_loss(config, micro, columns(seen, micro), micro.mask)
        whole = full_loss(config, micro, seen[None])
        assert torch.equal(direct, whole)
        one, two = (torch.autograd.grad(x, rows, retain_graph=True)[0] for x in (direct, whole))
        assert torch.equal(one, two)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "k3+"])
@pytest.mark.parametrize("loss", ["gspo", "vanilla", "kl_cov"])
def test_kl_and_entropy_terms_on_every_rank(loss, kind):
    for mode in modes():
        case = replace(BASE, loss=loss, mode=mode)
        data, micro, own = one_micro_batch(case)
        terms = {"entropy_coeff": 0.3, "use_kl_loss": True, "kl_loss_coef": 0.2}
        whole_loss = partial(full_loss, actor_config(case, kl_loss_type=kind, **terms), micro)
        rows = torch.stack([data.rows, data.entropy])
        whole = rows.clone().requires_grad_()
        value = whole_loss(whole)
        gradient = torch.autograd.grad(value, whole)[0]
        values, gradients = per_rank(whole_loss, rows, own)
        assert gradient.count_nonzero(dim=-1).min() > 0
        assert torch.equal(values, value.expand(case.C))
        assert torch.equal(gradients, own[:, None] * gradient)


@pytest.mark.parametrize("mode", modes())
def test_critic_on_every_rank(mode):
    data, micro, own = one_micro_batch(BASE)
    config = CriticConfig(
        strategy="megatron", ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, cliprange_value=0.1
    )
    tensors = tensor_dict(actor_config(BASE), micro)
    tensors["values"], tensors["returns"] = tensors["old_log_probs"], tensors["advantages"]

    def loss(values):
        return value_loss(config, {"values": values}, tensors)[0]

    whole = data.rows.clone().requires_grad_()
    gradient = torch.autograd.grad(loss(whole), whole)[0]
    values, gradients = per_rank(loss, data.rows, own)
    assert torch.equal(values, loss(data.rows).expand(BASE.C))
    assert torch.equal(gradients, own * gradient)
    assert gradient.count_nonzero() > 0


def test_tensor_dict_reads_as_in_the_engine():
    """The same counts through verl's own `assign_non_tensor`."""
    _, micro, _ = one_micro_batch(BASE)
    config = actor_config(BASE)
    ours, theirs = tensor_dict(config, micro), TensorDict({}, batch_size=[BASE.B])
    tensordict_utils.assign_non_tensor(theirs, **config.global_batch_info)
    assert all(ours[k] == theirs[k] for k in config.global_batch_info)


# What the objective depends on


@pytest.mark.parametrize("loss", losses())
def test_which_losses_depend_on_the_split(loss):
    """Additive over micro-batches, but for three losses, and for a divisor left to verl."""
    cells = [c for c in SWEEP if c.loss == loss and c.cp == 1 and c.clip and not c.rollout_weights]
    for case in cells:
        reference = unsharded(case)
        no_factor = column(case).endswith("no factor") and loss != "sapo"
        additive = loss not in ("clip_cov", "kl_cov", "geo_mean") and not no_factor
        assert reference.additive == additive
        assert additive or reference.deviation > 1e-3


def test_kl_cov_turns_on_one_rounding():
    """Two counted tokens have one covariance, `(-a)(-b) = a b`, and its rounding makes the choice.

    So a few spacings in one log-probability move the gradient; with three tokens they do not.
    """

    def moved(response):
        case = Case(sequences=(Sequence(1, response),), loss="kl_cov", mode="token-mean")
        data, micro, _ = one_micro_batch(case)
        rows, gradients = data.rows.clone(), []
        for _ in range(8):
            leaf = rows.clone().requires_grad_()
            loss = policy_loss(actor_config(case), micro, columns(leaf, micro), micro.mask)
            gradients.append(torch.autograd.grad(loss, leaf)[0])
            rows[0] = torch.nextafter(rows[0], rows.new_zeros(()))
        return max(largest(g - gradients[0], gradients[0]) for g in gradients)

    assert moved(2) > 0.01
    assert moved(3) < 1e-13


def test_batch_normalised_weights_of_bypass_mode_depend_on_the_split():
    """REINFORCE weights are then divided by their mean over the micro-batch."""
    case = replace(BASE, loss="bypass_mode", rollout_weights=True, cp=1, dp=1)
    data, config = batch(case), actor_config(case)

    def total(*parts):
        micros = [micro_batch(case, data, part) for part in parts]
        return sum(policy_loss(config, m, columns(data.rows[m.rows], m), m.mask) for m in micros)

    def deviation():
        return abs(total(range(4), range(4, case.B)) / total(range(case.B)) - 1)

    assert deviation() < 1e-13
    options = vars(config.policy_loss.rollout_correction)  # frozen
    options["rollout_is_batch_normalize"] = True
    assert deviation() > 0.01


def test_geo_mean_grows_with_the_number_of_micro_batches():
    """`torch.mean` over the micro-batch: two micro-batches of one sequence give twice the loss."""
    two = Case(sequences=(Sequence(1, 1), Sequence(1, 1)), loss="geo_mean", micro_batch_size=2)
    split = replace(two, micro_batch_size=1)
    one, other = (sharded(case, "mean") for case in (two, split))
    torch.testing.assert_close(other[0], 2 * one[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(other[1], 2 * one[1], rtol=1e-14, atol=0)


def test_sapo_takes_no_notice_of_the_mode():
    gradients = [unsharded(replace(BASE, loss="sapo", mode=mode)).gradient for mode in modes()]
    assert all(torch.equal(gradients[0], g) for g in gradients)
    expected = unsharded(replace(BASE, loss="vanilla", mode="token-sum")).gradient
    assert not torch.equal(gradients[0], expected)


def test_divisor_left_to_verl_is_the_micro_batchs_width():
    """Two responses of 1 and 3 tokens: in one micro-batch the short one is divided by 3 too."""
    case = Case(
        sequences=(Sequence(1, 1), Sequence(1, 3)),
        micro_batch_size=2,
        loss="gpg",
        mode="seq-mean-token-sum-norm",
    )
    together = sharded(case, "sum")[1][0]
    split = sharded(replace(case, micro_batch_size=1), "sum")[1][0]
    torch.testing.assert_close(split[:2], 3 * together[:2], rtol=1e-14, atol=0)
    torch.testing.assert_close(split[2:], together[2:], rtol=1e-14, atol=0)


def test_clip_cov_agrees_only_if_the_ranks_generators_do():
    case = replace(BASE, loss="clip_cov")
    data, config = batch(case), actor_config(case)
    for part in itertools.chain(*case.micro_batches()):
        micro = micro_batch(case, data, part)
        inputs = config, micro, columns(data.rows[micro.rows], micro), micro.mask
        assert len({float(policy_loss(*inputs, seed)) for seed in range(8)}) > 1
        assert len({float(policy_loss(*inputs, 5)) for _ in range(8)}) == 1


def test_bypass_mode_refuses_a_micro_batch_without_a_counted_token():
    case = Case(sequences=(Sequence(1, 1), Sequence(1, 1, (0,))), loss="bypass_mode")
    with pytest.raises(ValueError, match="response_mask must contain at least one valid token"):
        unsharded(case)
    assert check(replace(case, micro_batch_size=2)).passed


@pytest.mark.parametrize("loss", [name for name in losses() if name != "bypass_mode"])
def test_others_take_a_micro_batch_without_a_counted_token(loss):
    assert check(Case(sequences=(Sequence(1, 1), Sequence(1, 1, (0,))), loss=loss)).passed


@pytest.mark.parametrize("n", [1, 3, 9, 1000])
def test_epsilon_of_the_sequence_mean(n):
    """`n + 1e-8` is float32 and equals n where the mask is bool or int, as `ppo_loss` has it."""
    values = torch.rand(1, n, dtype=torch.float64) + 1

    def loss(mask):
        info = {"dp_size": 1, "global_batch_size": 1}
        return agg_loss(values, mask, "seq-mean-token-mean", **info)

    exact = values.sum() / n
    assert torch.equal(loss(torch.ones(1, n, dtype=torch.bool)), exact)
    assert torch.equal(loss(torch.ones(1, n, dtype=torch.long)), exact)
    relative = 1 - float(loss(torch.ones(1, n, dtype=torch.float64)) / exact)
    assert relative == pytest.approx(1e-8 / n, rel=1e-3, abs=2e-16)


# The question's own case


@pytest.mark.parametrize("regime", ["per-token", "averaging"])
def test_the_questions_case(regime):
    case = Case(
        sequences=(Sequence(1, 5), Sequence(1, 9)),
        cp=2,
        micro_batch_size=2,
        loss="gspo",
        mode="seq-mean-token-mean",
        clip_low=0.0003,
        clip_high=0.28,
        regime=regime,
        seed=31,
    )
    record = check(case)
    assert record.passed
    assert record.ranks == 2
    advantages = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 9)
    _, micro, own = one_micro_batch(case)
    micro = replace(micro, old=torch.zeros(2, 9, dtype=torch.float64), advantages=advantages)
    rows = 0.05 * torch.randn(case.T, generator=torch.Generator().manual_seed(31)).double()
    config = actor_config(case)

    def loss(x):
        return policy_loss(config, micro, columns(x, micro), micro.mask)

    whole = rows.clone().requires_grad_()
    reference = loss(whole)
    gradient = torch.autograd.grad(reference, whole)[0]
    values, gradients = per_rank(loss, rows, own)
    assert torch.equal(values, reference.detach().expand(2))
    assert largest(gradients - own * gradient, gradient) <= 1e-13
    assert largest(gradients.sum(0) - gradient, gradient) <= 1e-13
    assert get_policy_loss_fn("gspo").__name__ == "compute_policy_loss_gspo"
