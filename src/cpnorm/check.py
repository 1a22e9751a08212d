"""Loss and gradient of every context-parallel rank against the unsharded loss.

Assumed: the gather of verl 0.9.1's `postprocess_thd_engine` (all values, gradient of the rank's
own rows), and that Megatron's token count is exactly T. No model runs here.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .batch import batch
from .case import Case
from .layout import owners
from .losses import actor_config, columns, micro_batch, policy_loss

COPIES = 5  # of a micro-batch, in the probe that `unsharded` describes


def tolerance(dtype: str) -> float:
    """Largest relative error allowed: 1e-13 in float64, as many spacings in float32.

    `ValueError` for bfloat16, where that many spacings are more than the number itself.
    """
    if dtype == "bfloat16":
        raise ValueError("dtype is 'bfloat16', allowed for a verdict is float64 or float32")
    eps = torch.finfo(getattr(torch, dtype)).eps
    return 1e-13 * eps / torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Reference:
    """The unsharded loss and what was measured about the loss function, see `unsharded`."""

    value: torch.Tensor
    gradient: torch.Tensor
    deviation: float
    additive: bool
    copies: str


@dataclass(frozen=True)
class Record:
    """Outcome of `check`: relative errors, and the largest gradient outside a rank's own rows.

    Gradients are compared rank by rank; losses too where each rank has its own call, and otherwise
    their sum.
    """

    case: Case
    ranks: int
    additive: bool
    loss_error: float
    gradient_error: float
    off_shard: float

    @property
    def error(self) -> float:
        """The larger of the two errors."""
        return max(self.loss_error, self.gradient_error)

    @property
    def passed(self) -> bool:
        """Errors within `tolerance` and exact zeros outside the own rows. `ValueError` in
        bfloat16, which is measured and not judged."""
        return self.error <= tolerance(self.case.dtype) and self.off_shard == 0


def gather(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """What a rank's loss sees: the values of all rows, with the gradient of its own only.

    `rows` and the bool `own` have shapes that broadcast. verl 0.9.1's `postprocess_thd_engine`
    does it with `all_gather(output_list, output.detach())`, then `output_list[cp_rank] = output`.
    """
    return torch.where(own, rows, rows.detach())


def per_rank(
    loss: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, own: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Value `(C,)` and gradient `(C, ..., R)` of a loss of rows `(..., R)` on every rank.

    One call and one backward a rank; `own` is bool `(C, R)`.
    """
    values, gradients = [], []
    for mine in own:
        leaf = rows.clone().requires_grad_()
        value = loss(gather(leaf, mine))
        values.append(value.detach())
        gradients.append(torch.autograd.grad(value, leaf)[0])
    return torch.stack(values), torch.stack(gradients)


def mask_seen(micro, own: torch.Tensor) -> torch.Tensor:
    """Response mask that each rank's loss gets, `(C, b, w)`: verl 0.9.1 does not slice it."""
    return micro.mask.expand(len(own), -1, -1)


def scaled(case: Case, loss: torch.Tensor) -> torch.Tensor:
    """A micro-batch's loss as its backward sees it.

    Per token: x T/D (verl's `postprocess_micro_batch_func`). Averaging: x M there, x C/M in
    Megatron's schedule.
    """
    if case.regime == "per-token":
        return loss * case.T / case.D
    return loss * case.M * case.C / case.M


def finished(case: Case, total: torch.Tensor) -> torch.Tensor:
    """A sum over replicas, ranks and micro-batches as the optimizer sees it.

    Per token: / T, the count taken as exact. Averaging: the mean over the D C ranks.
    """
    return total / (case.T if case.regime == "per-token" else case.D * case.C)


def sharded(
    case: Case, copies: str, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss `(C,)`, gradient `(C, T)` and bool ownership `(C, T)` of every CP rank.

    Row c is what rank c (of each replica, for its own rows) contributes; the sum over c is what
    the optimizer gets. Each rank has its own leaf. With `copies` "sum" or "mean" (see `unsharded`)
    all ranks go through one call, one below the other in the batch dimension, and a rank's loss is
    the total's share; with "neither" each rank has its own call, but one for all that own no row.
    """
    data, config = batch(case, device=device), actor_config(case)
    value = data.rows.new_zeros(case.C)
    gradient = data.rows.new_zeros(case.C, case.T)
    owned = data.mask.new_zeros(case.C, case.T)
    for sequences in itertools.chain(*case.micro_batches()):
        micro = micro_batch(case, data, sequences)
        own = owners(micro.lengths, case.C, case.tp, case.layout).to(device)
        calls, of_rank = own, slice(None)
        if copies == "neither":  # ranks that own the same rows, which is none, call alike
            calls, of_rank = own.unique(dim=0, return_inverse=True)
        leaf = data.rows[micro.rows].repeat(len(calls), 1).requires_grad_()
        log_prob, mask = columns(gather(leaf, calls), micro), mask_seen(micro, calls)
        if copies == "neither":
            pairs = zip(log_prob.unbind(), mask, strict=True)
            loss = torch.stack([policy_loss(config, micro, *pair, case.seed) for pair in pairs])
        else:
            args = log_prob.flatten(0, 1), mask.flatten(0, 1)
            total = policy_loss(config, micro, *args, case.seed)
            loss = (total / case.C if copies == "sum" else total).expand(case.C)
        loss = scaled(case, loss)
        gradient[:, micro.rows] += torch.autograd.grad(loss.sum(), leaf)[0][of_rank]
        value += loss.detach()[of_rank]
        owned[:, micro.rows] = own
    return finished(case, value), finished(case, gradient), owned


def unsharded(case: Case, device: str = "cpu") -> Reference:
    """The loss without context parallelism, from verl's function alone, and two measurements.

    `deviation` is how far the losses of the micro-batches, added, are from the loss of the whole
    mini-batch in one call (largest difference of values and gradients, relative). If the loss is
    additive, value and gradient are those of the one call with D = M = C = 1. If not, they depend
    on the split, and are the mean over replicas of the sums over micro-batches.

    `copies` is what verl's function makes of a micro-batch repeated along the batch dimension:
    the "sum" of the copies' losses, their "mean", or "neither".

    In bfloat16 what the loss function is, additive and `copies`, is measured in float64.
    """
    whole = replace(case, dp=1, cp=1, tp=1, micro_batch_size=case.B)
    data = batch(case, device=device)
    parts = [micro_batch(case, data, part) for part in itertools.chain(*case.micro_batches())]
    value, gradient = _joined([_one_call(whole, data.rows, micro_batch(case, data, range(case.B)))])
    singles = [_one_call(whole, data.rows[part.rows], part) for part in parts]
    split_value, split_gradient = _joined(singles)
    deviation = _difference(split_value, split_gradient, value, gradient)
    if case.dtype == "bfloat16":
        function = unsharded(replace(case, dtype="float64"), device)
        additive, copies = function.additive, function.copies
    else:
        additive = deviation <= tolerance(case.dtype)
        kinds = {
            _copies(whole, data.rows[part.rows], part, *single)
            for part, single in zip(parts, singles, strict=True)
        }
        copies = kinds.pop() if len(kinds) == 1 else "neither"
    if not additive:
        replicas = replace(case, cp=1, tp=1)
        value, gradient = _joined(
            [_one_call(replicas, data.rows[part.rows], part) for part in parts]
        )
        value, gradient = value / case.D, gradient / case.D
    return Reference(value, gradient, deviation, additive, copies)


def check(case: Case, reference: Reference | None = None, device: str = "cpu") -> Record:
    """Compare `sharded` with `unsharded`, rank by rank and row by row.

    Rank c's gradient must be the reference's on its own rows and exactly 0 elsewhere; the sum over
    ranks must be the reference's everywhere. Errors are relative to the largest entry of the
    reference gradient (or to |J|, for the loss, if that is larger). `reference`, if given, must be
    that of the same case at any `cp`, `tp` and `layout`.
    """
    reference = reference or unsharded(case, device)
    value, gradient, own = sharded(case, reference.copies, device)
    largest = reference.gradient.abs().max()
    wrong = torch.cat([gradient - own * reference.gradient, gradient.sum(0)[None]])
    wrong[-1] -= reference.gradient
    return Record(
        case=case,
        ranks=case.D * case.C,
        additive=reference.additive,
        loss_error=_relative(
            value - reference.value, torch.maximum(largest, reference.value.abs())
        ),
        gradient_error=_relative(wrong, largest),
        off_shard=float((gradient * ~own).abs().max()),
    )


def _one_call(case, rows, micro, copies=1):
    """Loss and gradient `(copies, R)` of verl's function, no rank and no gather in sight."""
    leaf = rows.repeat(copies, 1).requires_grad_()
    log_prob = columns(leaf, micro).flatten(0, 1)
    loss = policy_loss(actor_config(case), micro, log_prob, micro.mask.repeat(copies, 1), case.seed)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def _joined(parts):
    """Sum of the losses, and the gradients of consecutive micro-batches end to end."""
    values, gradients = zip(*parts, strict=True)
    return sum(values), torch.cat(gradients, dim=1)[0]


def _copies(case, rows, micro, value, gradient):
    total, each = _one_call(case, rows, micro, COPIES)
    if _difference(total, each, COPIES * value, gradient) <= tolerance(case.dtype):
        return "sum"
    if _difference(total, COPIES * each, value, gradient) <= tolerance(case.dtype):
        return "mean"
    return "neither"


def _difference(value, gradient, expected_value, expected_gradient):
    """Largest difference of two (loss, gradient), relative to the second's largest number."""
    largest = torch.maximum(expected_gradient.abs().max(), expected_value.abs())
    wrong = torch.cat([(gradient - expected_gradient).flatten(), (value - expected_value)[None]])
    return _relative(wrong, largest)


def _relative(wrong, largest):
    """Largest of `wrong` over `largest`; absolute where the loss is constant."""
    return float(wrong.abs().max() / (largest if largest > 0 else 1))
