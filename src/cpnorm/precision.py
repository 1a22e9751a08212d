"""Where a step of verl on Megatron-Core rounds, and by how much at most.

Bounds are derived on the book's page on precision; here they are exact fractions where they can be.
A number in floating point of unit roundoff u is rounded by a factor 1 + delta, |delta| <= u.
"""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import expm1, log, prod
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from cpnorm.case import Case
from cpnorm.engine import model as engine_model
from cpnorm.engine.cuda_on_cpu import cuda_on_cpu
from cpnorm.engine.step import MODEL_CONFIG, Engine, data_of_replica, engine_config, numbers
from cpnorm.losses import actor_config
from cpnorm.topology import topology
from cpnorm.transformer import Model

UNIT = {
    name: Fraction(torch.finfo(getattr(torch, name)).eps) / 2
    for name in ("float64", "float32", "bfloat16", "float16")
}
"""Unit roundoff of a dtype, half the distance from 1 to the next number."""

EPSILON = Fraction(1e-8)
"""What verl 0.9.1's `agg_loss` adds to a sequence's count, the float64 nearest to 1e-8."""

SECOND_ORDER = 1 + Fraction(1, 2**16)
"""Covers the products of two float32 roundings in the bounds below."""

OVERFLOW = 65520.0
"""The least positive number that float16 rounds to infinity; 65504 is its largest finite one."""

WINDOW, HYSTERESIS = (int(getattr(OptimizerConfig, x)) for x in ("loss_scale_window", "hysteresis"))
"""Of Megatron-Core's loss scale: clean steps before it grows, overflows before it falls."""


def roundings(*units: Fraction) -> Fraction:
    """Largest relative error of a product that is rounded once to each of the unit roundoffs."""
    return prod((1 + u for u in units), start=Fraction(1)) - 1


def epsilon_shift(n: int) -> Fraction:
    """Relative change of a sequence's mean over n tokens when it is divided by n + `EPSILON`."""
    return -EPSILON / (n + EPSILON)


def round_trip(x: torch.Tensor, T: int, D: int) -> torch.Tensor:
    """x T / D in the dtype of `x`, then times the reciprocal of T as an int32 tensor.

    The first as verl 0.9.1's `postprocess_micro_batch_func`, with Python integers. The second as
    Megatron-Core's `finalize_model_grads` and `scale_gradients`.
    """
    y = x * T / D
    y *= 1.0 / torch.tensor(T, dtype=torch.int)
    return y


def round_trip_bound(dtype: str) -> Fraction:
    """Bound of the relative error of `round_trip`, if nothing leaves the range and T <= 2**24.

    Product, quotient and product in `dtype`, the reciprocal in float32.
    """
    return roundings(*[UNIT[dtype]] * 3, UNIT["float32"])


def relative_error(got: torch.Tensor, want: list[Fraction]) -> float:
    """Largest relative error of `got` against exact numbers, worked out exactly; inf if one is."""
    if not got.isfinite().all():
        return float("inf")
    pairs = zip(got.flatten().tolist(), want, strict=True)
    return float(max(abs(Fraction(x) / exact - 1) for x, exact in pairs))


def reciprocal_error(first: int, last: int) -> tuple[float, int]:
    """Largest relative error of `1.0 / n` over the int32 n of `first <= n <= last`, and that n.

    Exact: a float32 times n < 2**29 has at most 53 bits.
    """
    worst = (0.0, first)
    for start in range(first, last + 1, 2**20):
        n = torch.arange(start, min(start + 2**20, last + 1), dtype=torch.int)
        error = ((1.0 / n).double() * n.double() - 1).abs()
        worst = max(worst, (float(error.max()), int(n[error.argmax()])), key=lambda pair: pair[0])
    return worst


def cross_entropy_bound(largest: float, spread: float, V: int, height: int | None = None) -> float:
    """Bound of a log-probability's error in Megatron-Core's float32 cross entropy.

    `largest` is the largest absolute value of the logits if they must be rounded to float32, 0 if
    they have at most its bits. `spread` is their largest less their smallest, `height` that of the
    tree in which V terms are summed: at most V - 1, in any order.
    """
    height = V - 1 if height is None else height
    first = 2 * largest + 3 * spread + 3 * log(V) + 2 + height
    return float(SECOND_ORDER * UNIT["float32"]) * first


def router_bound(largest: float, spread: float, k: int) -> float:
    """Bound of the relative error of the router's softmax over k chosen logits, in float32.

    The arguments as `cross_entropy_bound`. torch's vectorised exponential is good to 20 units in
    the last place, which is 40 unit roundoffs, and enters twice.
    """
    first = 2 * largest + 2 * spread + 80 + (k - 1) + 2
    return expm1(float(SECOND_ORDER * UNIT["float32"]) * first)


@contextmanager
def alone() -> Iterator[None]:
    """Megatron-Core in this process, a world of one rank on the CPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with cuda_on_cpu(), topology():
            yield
    finally:
        dist.destroy_process_group()


class Low(Engine):
    """verl's engine on the tiny model in a 16-bit dtype, in a process that is `alone`.

    Every routed token stands for `tokens` of them, and every sequence for `sequences`: what is not
    run has no loss. Gradients add up in float32, as verl sets it, unless `wide` is False.
    """

    def __init__(
        self,
        case: Case,
        model: Model,
        dtype: str = "float16",
        tokens: int = 1,
        sequences: int = 1,
        wide: bool = True,
    ):
        super().__init__(MODEL_CONFIG, engine_config(case), None, None)
        self.case, self.stretch, self.device = case, tokens, "cpu"
        weights, ids, brought = numbers(case.sequences, case.seed, "float32", model)
        low = SimpleNamespace(**vars(case) | {"dtype": dtype})

        def ddp(**options):
            return DistributedDataParallelConfig(**options | {"grad_reduce_in_fp32": wide})

        with mock.patch.object(engine_model, "DistributedDataParallelConfig", ddp):
            self.initialize(low, model, weights)
        self.data = data_of_replica(case, ids, brought, 0)
        tu.assign_non_tensor(self.data, global_batch_size=case.B * sequences)

    def _routed_num_tokens(self, data):
        return super()._routed_num_tokens(data) * self.stretch

    def gradients(self, scale: torch.Tensor) -> list[torch.Tensor]:
        """One step's `main_grad` of a loss times `scale`, one tensor a parameter."""
        for chunk in self.module:
            chunk.zero_grad_buffer()
        self.tf_config.grad_scale_func = lambda loss: scale * loss
        loss = functools.partial(ppo_loss, config=actor_config(self.case))
        self.forward_backward_batch(self.data.clone(), loss)
        return [p.main_grad for chunk in self.module for p in chunk.module.parameters()]


@dataclass(frozen=True)
class Settled:
    """The first step without overflow: its loss scale, the steps skipped before it, and the
    gradient that the optimizer gets, end to end. Scale and gradient are None if no step is."""

    scale: float | None
    skipped: int
    gradient: torch.Tensor | None


def settle(engine: Low, initial: float = 2.0**15, least: float = 1.0) -> Settled:
    """Repeat the step under Megatron-Core's `DynamicGradScaler` until nothing overflows.

    `initial` and `least` default to what verl 0.9.1's `init_megatron_optim_config` sets, the rest
    to Megatron-Core's own. As its `MixedPrecisionOptimizer.prepare_grads`. The weights stay, so a
    step that overflows at the least scale does so forever.
    """
    scaler = DynamicGradScaler(initial, least, 2.0, 0.5, WINDOW, HYSTERESIS)
    for skipped in itertools.count():
        gradients, found = engine.gradients(scaler.scale), torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scaler.inv_scale)
        if not found:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            return Settled(float(scaler.scale), skipped, flat)
        if float(scaler.scale) <= least:
            return Settled(None, skipped, None)
        scaler.update(True)


def skipped_steps(halvings: int) -> int:
    """Steps without an update until the loss scale has been halved so often, from a new scaler."""
    return halvings + HYSTERESIS - 1 if halvings else 0
