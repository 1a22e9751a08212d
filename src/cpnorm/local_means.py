"""The mistake that the guard of verl 0.9.0 was written against: a rank divides by its own share.

Nothing is gathered here. A rank's loss gets the log-probabilities of its own rows, the mask and the
trainer's numbers of these rows, and nothing else; the function is verl's. Losses and gradients are
averaged over CP: a sum over CP is C times as large.
"""

import functools
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from . import oracle
from .batch import Batch, batch
from .case import Case, Sequence
from .layout import owners
from .losses import MicroBatch, actor_config, columns, micro_batch, policy_loss
from .transformer import Model, weights


def shares(sequence: Sequence, C: int, tp: int = 1) -> tuple[int, ...]:
    """`n_{s,c}`: counted response tokens of a sequence on each of C ranks, zigzag."""
    rows = owners((sequence.length,), C, tp)[:, sequence.prompt - 1 : -1]
    return tuple((rows & torch.tensor(sequence.counted, dtype=torch.bool)).sum(1).tolist())


def factors(shares: tuple[int, ...]) -> tuple[Fraction | None, ...]:
    """`n_s / (C n_{s,c})`: what a token of rank c weighs after averaging, 1 where it is right.

    None for an empty share, which has no token to weigh. A sum over CP weighs C times as much.
    """
    return tuple(Fraction(sum(shares), len(shares) * n) if n else None for n in shares)


def on_rank(micro: MicroBatch, log_prob: Tensor, own: Tensor) -> tuple[MicroBatch, Tensor]:
    """The micro-batch and its log-probabilities as a rank without the gather has them.

    `log_prob` is `(b, w)`, `own` a rank's bool `(R,)`. What is left is `(b, v)`, v the most
    response tokens that the rank owns of a sequence, 1 or more; a sequence's own tokens come first
    and in order, the mask is 0 behind them.
    """
    mine = columns(own.long(), micro) > 0
    width = max(1, int(mine.sum(1).max()))
    order = mine.int().argsort(dim=1, descending=True, stable=True)[:, :width]

    def kept(table):
        return table.gather(1, order)

    numbers = {"old": kept(micro.old), "advantages": kept(micro.advantages)}
    if micro.weights is not None:
        numbers["weights"] = kept(micro.weights)
    return replace(micro, mask=kept(micro.mask & mine), **numbers), kept(log_prob)


def local_loss(case: Case, data: Batch, rows: Tensor) -> Tensor:
    """verl's loss of `case`, each rank on its own share, averaged over CP. `rows` is `(T,)`.

    The sum over replicas and micro-batches divided by D, as the objective is.
    """
    config, total = actor_config(case), 0
    for sequences in (part for replica in case.micro_batches() for part in replica):
        micro = micro_batch(case, data, sequences)
        log_prob = columns(rows[micro.rows], micro)
        for own in owners(micro.lengths, case.C, case.tp, case.layout):
            local, new = on_rank(micro, log_prob, own)
            total = total + policy_loss(config, local, new, local.mask, case.seed)
    return total / (case.D * case.C)


def row_gradients(case: Case) -> tuple[Tensor, Tensor]:
    """Gradient by every row, `(T,)`: verl's loss on one rank, and on C ranks with local shares."""
    data = batch(case)
    rows = data.rows.clone().requires_grad_()
    losses = (local_loss(replace(case, cp=C), data, rows) for C in (1, case.C))
    whole, local = (torch.autograd.grad(loss, rows)[0] for loss in losses)
    return whole, local


def parameter_gradients(case: Case, model: Model) -> tuple[dict, dict]:
    """Gradient by every parameter of the tiny transformer, both ways, as `row_gradients`."""
    data = batch(case, *oracle.model_outputs(case, model, weights(model, case.seed)))
    local = functools.partial(local_loss, case, data)
    return oracle.gradient(case, model)[1], oracle.gradient(case, model, local)[1]


def engine_on_rank(case: Case, model: Model):
    """One exact step through verl's engine on this rank of a `World`, its mask cut to its share.

    The gather stays, but the loss reads rows where the mask is 1 only. Returns `RankResult`.
    """
    from megatron.core import parallel_state

    from cpnorm.engine.step import Engine, run_rank

    class Local(Engine):
        def postprocess_micro_batch_func(self, output, data, *args, **kwargs):
            rank, masks = parallel_state.get_context_parallel_rank(), []
            sizes = (data[name].offsets().diff().tolist() for name in ("prompts", "responses"))
            for prompt, response, mask in zip(*sizes, data["response_mask"].unbind(), strict=True):
                own = owners((prompt + response,), case.C, case.tp)[rank, prompt - 1 : -1]
                masks.append(mask * own)
            data["response_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
            return super().postprocess_micro_batch_func(output, data, *args, **kwargs)

    return run_rank(case, model, True, Local)
