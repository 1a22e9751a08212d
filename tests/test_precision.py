"""Every bound of the page on precision against the real function, and the loss scale in float16."""

from dataclasses import replace
from fractions import Fraction
from math import log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpnorm import precision
from cpnorm.case import Case, Sequence
from cpnorm.transformer import Model

CASE = Case(sequences=(Sequence(3, 5), Sequence(6, 21)), micro_batch_size=2, dtype="float32")
SMALL = Model(layers=1, vocab=16)
DTYPES = pytest.mark.parametrize("dtype", precision.UNIT)


@pytest.fixture(scope="module", autouse=True)
def process():
    """Megatron-Core in this process, after another world in it that has ended."""
    with precision.alone():
        pass
    with precision.alone():
        yield


@DTYPES
def test_unit_roundoff_is_half_a_spacing(dtype):
    one, u = torch.ones(1, dtype=getattr(torch, dtype)), float(precision.UNIT[dtype])
    assert one + u == 1  # a tie goes to the even neighbour
    assert one + 2 * u > 1


@given(st.lists(st.fractions(-1, 1), min_size=1, max_size=6))
def test_no_chain_of_roundings_is_off_by_more(shares):
    u = Fraction(1, 8)
    product = Fraction(1)
    for share in shares:
        product *= 1 + share * u
    assert abs(product - 1) <= precision.roundings(*[u] * len(shares))


@DTYPES
@given(T=st.integers(1, 10**7), D=st.integers(1, 32), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_times_t_over_d_divided_by_k(dtype, T, D, seed):
    """Numbers around 2**-9, so that neither x T nor x / D leaves float16's normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(16, generator=generator, dtype=torch.float64) + 1) * 2**-9
    x = x.to(getattr(torch, dtype))
    exact = [Fraction(value) / D for value in x.tolist()]
    found = precision.relative_error(precision.round_trip(x, T, D), exact)
    assert found <= precision.round_trip_bound(dtype)


def test_float32_rounds_more_than_float64_does():
    x = torch.linspace(1, 2, 99, dtype=torch.float64)
    found = precision.relative_error(
        precision.round_trip(x, 4095, 1), [Fraction(value) for value in x.tolist()]
    )
    assert precision.roundings(*[precision.UNIT["float64"]] * 9) < found


def test_reciprocal():
    u = precision.UNIT["float32"]
    worst, at = precision.reciprocal_error(1, 2**16)
    assert float(u) * 0.999 < worst <= u
    assert at == 4095
    worst, _ = precision.reciprocal_error(2**24, 2**24 + 2**16)
    assert u < worst <= precision.roundings(u, u)


@given(n=st.integers(1, 2**16))
def test_the_epsilon_is_lost_beside_a_count(n):
    from verl.trainer.ppo.core_algos import agg_loss

    ones = torch.ones(1, n, dtype=torch.float64)
    losses = {
        dtype: Fraction(
            float(agg_loss(ones, ones.to(dtype), "seq-mean-token-mean", global_batch_size=1))
        )
        for dtype in (torch.bool, torch.int64, torch.float64)
    }
    assert losses[torch.bool] == losses[torch.int64] == 1
    shift = losses[torch.float64] - 1
    assert shift < 0
    slack = precision.roundings(*[precision.UNIT["float64"]] * 2)
    assert abs(shift - precision.epsilon_shift(n)) <= slack


@pytest.mark.parametrize("scale", [0.1, 3, 30])
@pytest.mark.parametrize("V", [2, 64, 5000])
def test_cross_entropy(V, scale):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(64, V, generator=generator, dtype=torch.float64) * scale
    target = torch.randint(V, (64,), generator=generator)
    found = vocab_parallel_cross_entropy(logits.clone(), target).double()
    error = (found + logits.log_softmax(-1)[torch.arange(64), target]).abs()
    sizes = logits.abs().max(1).values, logits.max(1).values - logits.min(1).values
    bounds = [
        precision.cross_entropy_bound(float(z), float(r), V) for z, r in zip(*sizes, strict=True)
    ]
    assert (error <= torch.tensor(bounds, dtype=torch.float64)).all()
    assert error.max() > 2**-26 * scale  # float32 indeed


@pytest.mark.parametrize("k", [2, 8])
def test_router(k):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(500, 16, generator=generator, dtype=torch.float64) * 5
    chosen = logits.topk(k, dim=1)
    shares, _ = topk_routing_with_score_function(logits, k)
    error = (shares.gather(1, chosen.indices) / chosen.values.softmax(-1) - 1).abs().max(1).values
    spread = chosen.values[:, 0] - chosen.values[:, -1]
    sizes = zip(chosen.values.abs().max(1).values.tolist(), spread.tolist(), strict=True)
    bounds = torch.tensor([precision.router_bound(z, r, k) for z, r in sizes])
    assert (error <= bounds).all()
    assert error.max() > 2**-26


def test_a_count_beyond_int32_divides_nothing():
    from megatron.core.distributed import finalize_model_grads

    chunk = precision.Low(CASE, SMALL).module[0]
    count = torch.tensor(2**31 - 1, dtype=torch.int)
    for reported, left in ((count, 2.0**-31), (count + 1, 1.0)):
        chunk.buffers[0].grad_data.fill_(1)
        finalize_model_grads([chunk], reported)
        assert (chunk.buffers[0].grad_data == left).all()


def test_scaler_and_verl_start_alike(capsys):
    """Without its precision-aware optimizer, which asks for Transformer Engine."""
    from verl.utils.megatron.optimizer import init_megatron_optim_config
    from verl.workers.config import McoreOptimizerConfig

    override = {"use_precision_aware_optimizer": False}
    asked = McoreOptimizerConfig(lr=1e-6, override_optimizer_config=override)
    config = init_megatron_optim_config(asked, fp16=True)
    assert (config.initial_loss_scale, config.min_loss_scale) == precision.settle.__defaults__
    assert (config.loss_scale_window, config.hysteresis) == (precision.WINDOW, precision.HYSTERESIS)


def test_main_gradients_are_float32_and_the_model_is_float16():
    chunk = precision.Low(CASE, SMALL).module[0]
    assert {p.dtype for p in chunk.module.parameters()} == {torch.float16}
    assert {p.main_grad.dtype for p in chunk.module.parameters()} == {torch.float32}


def test_loss_scale_takes_up_the_tokens():
    first = precision.settle(precision.Low(CASE, SMALL))
    assert first.skipped == precision.skipped_steps(log2(2**15 / first.scale)) > 1
    later = precision.settle(precision.Low(CASE, SMALL, tokens=2**6))
    assert later.scale * 2**6 == first.scale
    assert torch.equal(later.gradient, first.gradient)
    stuck = precision.Low(CASE, SMALL, tokens=2**18)
    assert precision.settle(stuck, initial=2.0).scale is None
    assert precision.settle(stuck, initial=1.0, least=2.0**-9).scale == first.scale / 2**18


def test_averaging_regime_does_not_see_the_tokens():
    mean = replace(CASE, regime="averaging")
    one, many = (precision.settle(precision.Low(mean, SMALL, tokens=k)) for k in (1, 2**18))
    assert one.scale == many.scale == 2.0**15
    assert one.skipped == 0
