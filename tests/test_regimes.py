"""Averaging, per-token and two values: the factors of a run, and the auxiliary loss beside them."""

from dataclasses import replace
from fractions import Fraction
from importlib.metadata import version

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpnorm import engine, oracle, regimes, transformer
from cpnorm.case import Case, Sequence
from cpnorm.examined import FACTS
from cpnorm.ranks import World
from cpnorm.regimes import EXACT, FACTORS
from cpnorm.transformer import Model

SEQUENCES = (
    Sequence(3, 5),
    Sequence(4, 9, (1, 1, 1, 0, 0, 1, 1, 0, 1)),
    Sequence(6, 21),
    Sequence(2, 7, (0,) * 7),
    Sequence(5, 6),
    Sequence(3, 4),
)
CASE = Case(sequences=SEQUENCES, clip_low=0.05, clip_high=0.1, seed=2)
FOUR = replace(CASE, sequences=SEQUENCES[:4])
UNPADDED = Case(sequences=tuple(Sequence(*n) for n in ((3, 5), (4, 12), (6, 18), (2, 6))))
BOUND = 2 * EXACT  # of two exact runs against each other


@pytest.fixture(scope="module")
def world():
    with World(4) as four:
        yield four


@pytest.fixture(scope="module")
def one_rank():
    """Auxiliary parts on one rank, by case, each measured once."""
    known = {}
    with World(1) as alone:

        def look_up(case):
            if case not in known:
                known[case] = regimes.aux_part(alone, case)
            return known[case]

        yield look_up


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_lone_token_moves_one_log_probability(seed):
    case, model = replace(CASE, seed=seed), Model()
    sequence, token = regimes.lone_token(case, model)
    weights = transformer.weights(model, seed)

    before, _ = oracle.model_outputs(case, model, weights)
    weights[regimes.EMBEDDING][token] += 0.1
    after, _ = oracle.model_outputs(case, model, weights)
    moved = ((after - before).abs() > 1e-12).nonzero().flatten().tolist()
    end = sum(s.length for s in case.sequences[: sequence + 1])
    assert moved == [end - 2, end - 1]  # the last row has no loss


def test_a_mini_batch_without_a_lone_token_is_refused():
    with pytest.raises(ValueError, match="seed is 4: no last row"):
        regimes.lone_token(replace(CASE, seed=4), Model())


@given(*[st.integers(1, 10**6)] * 5)
def test_what_the_factors_multiply_to(D, C, M, T, K):
    D, C, M, T, K = map(Fraction, (D, C, M, T, K))
    for name, end in (("averaging", 1), ("per-token", T / K), ("two values", D * C)):
        f1, f2, f3, f4 = FACTORS[name](D, C, M, T, K)
        assert f1 * f2 * f3 * f4 * D == end


WAYS = {
    "averaging": ({"regime": "averaging"}, "verl"),
    "per-token": ({}, "verl"),
    "two values": ({}, "two values"),
}


@pytest.mark.parametrize("topology", [{"dp": 2, "cp": 2}, {"cp": 4}], ids=["DP 2, CP 2", "CP 4"])
@pytest.mark.parametrize("name", WAYS)
def test_every_factor_of_a_run(world, name, topology):
    change, variant = WAYS[name]
    case = replace(CASE, **topology, **change)
    values = regimes.trace(world, case, variant)
    sizes = [Fraction(n) for n in (case.D, case.C, case.M, case.T, case.K)]
    factors = FACTORS[name](*sizes)
    for found, factor in zip(regimes.ratios(values), factors, strict=True):
        assert abs(found / float(factor) - 1) <= EXACT
    _, gradient = oracle.gradient(case, Model())
    _, token = regimes.lone_token(case, Model())
    end = float(factors[0] * factors[1] * factors[2] * factors[3] * case.D)
    wrong = values[-1] - end * gradient[regimes.EMBEDDING][token]
    assert wrong.abs().max() <= EXACT * values[-1].abs().max()


def test_a_trace_needs_the_whole_way_on_each_rank(world):
    with pytest.raises(ValueError, match="pp is 2 and tp is 1"):
        regimes.trace(world, replace(FOUR, cp=2, pp=2))


TERMS = {"kl_coef": 0.2, "entropy_coef": 0.3}
TOPOLOGIES = {  # others run in the notebook
    "CP 4, one micro-batch": {"cp": 4, "micro_batch_size": 4},
    "CP 2, PP 2, KL and entropy": {"cp": 2, "pp": 2, **TERMS},
    "CP 2, TP 2": {"cp": 2, "tp": 2},
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_three_ways_differ_by_what_the_factors_say(world, name):
    case = replace(FOUR, **TOPOLOGIES[name])
    averaging = engine.run(world, replace(case, regime="averaging"), exact=True)
    for variant, expected, K in (
        ("verl", case.T / case.K, case.K),
        ("remainder", 1, case.T),
        ("two values", case.D * case.C, 0),
    ):
        step = engine.run(world, case, exact=True, variant=variant)
        found = engine.compare(step, averaging.gradients, averaging.loss)
        assert step.K == K
        assert abs(found.ratio / expected - 1) <= BOUND
        assert found.residual <= BOUND
        assert found.loss <= BOUND


def test_the_reciprocal_is_the_regimes_only_float32_where_all_else_is_a_power_of_two(world):
    lengths = (13, 21, 9, 21)
    case = replace(CASE, sequences=tuple(Sequence(3, n - 3) for n in lengths), cp=4)
    assert (case.T, case.K) == (64, 60)
    averaging = engine.run(world, replace(case, regime="averaging"))
    found = engine.compare(engine.run(world, case), averaging.gradients, averaging.loss)
    reciprocal = float(torch.tensor(1.0) / torch.tensor(case.K))
    assert EXACT < abs(reciprocal * case.K - 1) <= 2**-24
    assert abs(found.ratio / (case.T * reciprocal) - 1) <= BOUND
    assert found.residual <= BOUND


def against(part, reference):
    """Ratio, residual, and what rounding may make of either."""
    found = engine.compare(part[0], reference[0].gradients, 0.0)
    return found.ratio, found.residual, part[1] + reference[1]


SHARDED = {  # CP 4 runs in the notebook
    "DP 2, CP 2": {"dp": 2, "cp": 2},
    "CP 2, TP 2": {"cp": 2, "tp": 2},
    "CP 2, PP 2": {"cp": 2, "pp": 2},
}


@pytest.mark.parametrize("name", SHARDED)
def test_auxiliary_loss_without_padding(world, one_rank, name):
    case = replace(UNPADDED, **SHARDED[name])
    for regime, factor in (("averaging", 1.0), ("per-token", regimes.aux_factor(case))):
        part = regimes.aux_part(world, replace(case, regime=regime))
        ratio, residual, bound = against(part, one_rank(replace(UNPADDED, regime=regime)))
        assert abs(ratio / factor - 1) <= bound
        assert residual <= bound
    two = regimes.aux_part(world, case, "two values")
    ratio, residual, bound = against(two, part)
    assert abs(ratio / case.K - 1) <= bound
    assert residual <= bound


DOUBLE = replace(
    UNPADDED, sequences=tuple(Sequence(2 * s.prompt, 2 * s.response) for s in UNPADDED.sequences)
)


@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (2, 1), (4, 1), (4, 2), (8, 1)])
def test_auxiliary_loss_at_every_size_that_the_table_calls_measured(one_rank, cp, tp):
    """With (2, 2), which `SHARDED` has, and (1, 1), the reference."""
    measured = FACTS["megatron-core"][version("megatron-core")].measured
    assert {(cp, tp), (2, 2), (1, 1)} <= set(measured)
    case = replace(DOUBLE, cp=cp, tp=tp)
    with World(cp * tp) as ranks:
        part = regimes.aux_part(ranks, case)
    ratio, residual, bound = against(part, one_rank(DOUBLE))
    assert abs(ratio / regimes.aux_factor(case) - 1) <= bound
    assert residual <= bound


@pytest.mark.parametrize("regime", ["averaging", "per-token"])
def test_padding_turns_the_auxiliary_loss(world, one_rank, regime):
    ragged = replace(UNPADDED, sequences=SEQUENCES[:4], regime=regime)
    part = regimes.aux_part(world, replace(ragged, cp=4))
    _, residual, bound = against(part, one_rank(ragged))
    assert residual > 1e6 * bound


def test_regimes_weigh_the_auxiliary_loss_of_unequal_micro_batches_unlike(one_rank):
    equal = replace(UNPADDED, sequences=tuple(Sequence(n, 16 - n) for n in (3, 4, 6, 2)))
    for case, alike in ((equal, True), (UNPADDED, False)):
        pair = [one_rank(replace(case, regime=r)) for r in ("per-token", "averaging")]
        ratio, residual, bound = against(*pair)
        assert (residual <= bound and abs(ratio - 1) <= bound) == alike


def test_a_release_that_was_not_measured_has_no_factor(monkeypatch):
    monkeypatch.setattr(regimes, "version", lambda _: "0.99.0")
    with pytest.raises(KeyError, match=r"0\.99\.0"):
        regimes.aux_factor(UNPADDED)
