"""verl's Megatron engine against the transformer in plain torch, in small worlds."""

import pkgutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cpnorm import engine, oracle
from cpnorm.case import Case, Sequence, divisor
from cpnorm.engine import cuda_on_cpu, float64, result
from cpnorm.ranks import RankError, World
from cpnorm.transformer import Model
from engine_functions import offsets_after_a_step

SEQUENCES = (
    Sequence(3, 5),
    Sequence(4, 9, (1, 1, 1, 0, 0, 1, 1, 0, 1)),
    Sequence(6, 21),
    Sequence(2, 7, (0,) * 7),
)
CASE = Case(sequences=SEQUENCES, clip_low=0.05, clip_high=0.1)
DENSE, MOE = Model(), Model(experts=4)
DEEP = Model(layers=4)

EXACT = 1e-13  # largest deviation relative to the largest gradient, and of the ratio, in float64
FLOAT32 = 2.0**-23


@pytest.fixture(scope="module")
def world():
    with World(4) as four:
        yield four


@pytest.fixture(scope="module")
def reference():
    known = {}

    def look_up(case, model):
        key = (replace(case, dp=1, cp=1, tp=1, pp=1, vpp=None, micro_batch_size=1), model)
        if key not in known:
            known[key] = oracle.gradient(key[0], model)
        return known[key]

    return look_up


TOPOLOGIES = {
    "CP 4": (CASE, {"cp": 4}, DENSE),
    "CP 4, one micro-batch": (CASE, {"cp": 4, "micro_batch_size": 4}, DENSE),
    "CP 4, dynamic micro-batches": (CASE, {"cp": 4, "max_token_len": 12}, DENSE),
    "DP 2, CP 2": (CASE, {"dp": 2, "cp": 2}, DENSE),
    "DP 2, CP 2, averaging": (CASE, {"dp": 2, "cp": 2, "regime": "averaging"}, DENSE),
    "DP 4": (CASE, {"dp": 4}, DENSE),
    "CP 2, TP 2": (CASE, {"cp": 2, "tp": 2}, DENSE),
    "CP 2, PP 2": (CASE, {"cp": 2, "pp": 2}, DENSE),
    "CP 2, PP 2, interleaved": (CASE, {"cp": 2, "pp": 2, "vpp": 2}, DEEP),
    "CP 4, experts": (CASE, {"cp": 4}, MOE),
    "CP 2, TP 2, experts": (CASE, {"cp": 2, "tp": 2}, MOE),
    "CP 4, KL and entropy": (CASE, {"cp": 4, "kl_coef": 0.2, "entropy_coef": 0.3}, DENSE),
    "CP 2, TP 2, KL and entropy": (
        CASE,
        {"cp": 2, "tp": 2, "kl_coef": 0.2, "entropy_coef": 0.3},
        DENSE,
    ),
    "DP 2, CP 2, PPO": (CASE, {"dp": 2, "cp": 2, "loss": "vanilla", "mode": "token-mean"}, DENSE),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_gradient_is_t_over_k_times_the_oracles(world, reference, name):
    base, changes, model = TOPOLOGIES[name]
    case = replace(base, **changes)
    J, gradient = reference(case, model)
    step = engine.run(world, case, model, exact=True)
    found = engine.compare(step, gradient, float(J))
    assert step.T == case.T
    if case.max_token_len is None:
        assert step.t == case.t
    if case.regime == "per-token":
        assert divisor(step.t, case.C) == step.K
    assert found.residual <= EXACT
    assert abs(found.ratio / step.predicted(case.C) - 1) <= EXACT
    assert found.loss <= EXACT


def test_float32_steps_are_all_that_differs(world, reference):
    """Without the replacement the same run is off by float32, and by no more."""
    case = replace(CASE, cp=4)
    J, gradient = reference(case, DENSE)
    step = engine.run(world, case, DENSE)
    found = engine.compare(step, gradient, float(J))
    assert found.residual > EXACT
    assert abs(found.ratio / step.predicted(4) - 1) <= FLOAT32
    again = engine.run(world, case, DENSE)
    assert all(torch.equal(again.gradients[k], g) for k, g in step.gradients.items())


def test_same_float32_steps_give_the_same_numbers(world):
    """Runs of one topology class differ by the ratio alone: residual and losses at 1e-13."""
    alone = engine.run(world, replace(CASE, dp=4), DENSE)
    for changes in ({"cp": 4}, {"dp": 2, "cp": 2}, {"cp": 4, "micro_batch_size": 4}):
        step = engine.run(world, replace(CASE, **changes), DENSE)
        found = engine.compare(step, alone.gradients, alone.loss)
        assert found.residual <= EXACT
        assert found.loss <= 1e-12


def test_no_token_counted(world, reference):
    """Every micro-batch shorter than CP: K is 0, Megatron divides by nothing, T times too large."""
    case = Case(sequences=(Sequence(1, 1), Sequence(1, 2)), cp=4)
    J, gradient = reference(case, DENSE)
    step = engine.run(world, case, DENSE, exact=True)
    assert step.K == 0
    found = engine.compare(step, gradient, float(J))
    assert abs(found.ratio / case.T - 1) <= EXACT
    assert step.predicted(4) == case.T


@pytest.mark.parametrize("loss", ["clip_cov", "sapo", "bypass_mode", "geo_mean"])
def test_other_losses_against_the_unsharded_engine(world, loss):
    case = replace(CASE, loss=loss, sequences=SEQUENCES[:3] + SEQUENCES[:1])
    with World(1) as one:
        alone = engine.run(one, case, DENSE, exact=True)
    step = engine.run(world, replace(case, cp=4), DENSE, exact=True)
    found = engine.compare(step, alone.gradients, alone.loss)
    assert found.residual <= EXACT
    assert abs(found.ratio / step.predicted(4) - 1) <= EXACT


REFUSED = {
    "tp": (replace(CASE, tp=8, cp=1), DENSE, "tp is 8, allowed is a divisor of the 4 attention"),
    "groups": (replace(CASE, tp=4), DENSE, "tp is 4, allowed is a divisor of the 2 query groups"),
    "layers": (replace(CASE, pp=4), DENSE, r"pp \* vpp is 4, allowed is a divisor of the 2 layers"),
    "virtual": (
        replace(CASE, pp=2, vpp=2, sequences=SEQUENCES[:3]),
        DEEP,
        "vpp needs micro-batches in groups of pp = 2, but M is 3",
    ),
    "layout": (replace(CASE, cp=2, layout="contiguous"), DENSE, "layout is 'contiguous'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_it_starts(name):
    case, model, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        engine.check_fit(case, model)


def test_a_world_of_another_size_names_both_sizes():
    with World(2) as two, pytest.raises(RankError, match="needs 4 ranks"):
        engine.run(two, replace(CASE, cp=4), DENSE)


EVEN, RAGGED = (Sequence(3, 3),) * 4, SEQUENCES


def test_the_counts_all_reduce_writes_into_the_batch():
    """verl 0.9.1 with the batch on the compute device: the last offset becomes the global count.

    With equal lengths nothing raises, and the batch that the caller holds is no longer its own.
    """
    with World(2) as two:
        sound = two.run(offsets_after_a_step, EVEN, True)
        for (before, after, largest), (_, _, expected) in zip(
            two.run(offsets_after_a_step, EVEN, False), sound, strict=True
        ):
            assert before == [0, 6, 12]
            assert after == [0, 6, 24]
            assert largest == expected


def test_the_corrupted_batch_breaks_the_step():
    with World(2) as two, pytest.raises(RankError, match="must match the size"):
        two.run(offsets_after_a_step, RAGGED, False)


def test_a_copy_of_the_count_leaves_the_batch_alone():
    with World(2) as two:
        for before, after, _ in two.run(offsets_after_a_step, RAGGED, True):
            assert after == before


def test_a_variant_of_the_per_token_regime_is_refused_in_the_other():
    world, averaging = SimpleNamespace(size=1, device="cpu"), replace(CASE, regime="averaging")
    with pytest.raises(ValueError, match="variant is 'two values', allowed in the averaging"):
        engine.run(world, averaging, variant="two values")


def test_what_all_tp_ranks_hold_must_be_alike():
    shards = [torch.ones(2), 5 * torch.ones(2)]
    assert result.join("cut.weight", shards, 0).tolist() == [1, 1, 5, 5]
    assert result.join("norm.weight", shards[:1] * 2, None).tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"the TP ranks differ in the gradient of norm\.weight"):
        result.join("norm.weight", shards, None)


def test_a_layout_is_refused_by_the_field_that_is_missing(monkeypatch):
    case = replace(CASE, cp=2, layout="contiguous")
    for has, why in ((False, "has no PackedSeqParams.cp_partition_mode"), (True, "verl asks for")):
        fields = frozenset({"cp_partition_mode"} if has else ())
        monkeypatch.setattr(engine.installed, "fields", lambda *_, fields=fields: fields)
        with pytest.raises(ValueError, match=f"layout is 'contiguous', allowed is zigzag: .*{why}"):
            engine.check_fit(case, DENSE)


def test_stages_do_not_share_a_gpu():
    world = SimpleNamespace(size=2, device="cuda", backend="gloo")
    with pytest.raises(ValueError, match="pp is 2, allowed is 1 where ranks share a GPU"):
        engine.run(world, replace(CASE, pp=2))


@pytest.mark.parametrize("name", cuda_on_cpu.REPLACED | float64.REPLACED)
def test_every_replaced_name_exists(name):
    assert callable(pkgutil.resolve_name(name))


@pytest.mark.parametrize(
    "name", ["initialize", "_routed_num_tokens", "postprocess_micro_batch_func"]
)
def test_every_overridden_method_exists(name):
    path = "verl.workers.engine.megatron.transformer_impl.MegatronEngineWithLMHead"
    assert callable(getattr(pkgutil.resolve_name(path), name))


def test_a_name_that_upstream_lacks_stops_the_run(monkeypatch):
    gone = {"torch.cuda.no_such_name": (None, "")}
    monkeypatch.setattr(cuda_on_cpu, "REPLACED", gone)
    with pytest.raises(AttributeError, match="no_such_name"), cuda_on_cpu.cuda_on_cpu():
        pass
