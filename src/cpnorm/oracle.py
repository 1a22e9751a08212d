"""The answer without any parallelism, from the papers, in plain torch. Nothing of verl is used.

GSPO (arXiv 2507.18071) and PPO-clip (arXiv 1707.06347) with its dual clip (arXiv 1912.09729).
`J` here is what is minimised, so it is minus the objective that the papers maximise.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .batch import Batch, batch
from .case import Case
from .transformer import Model, entropies, log_probs, log_softmax, token_ids, weights

RATIO_BOUND = 20.0  # verl clamps PPO's log-ratio to +-20
LOG_RATIO_MAX = 10.0  # and GSPO's from above to 10, which real ratios do not reach
DUAL_CLIP = 3.0  # c of arXiv 1912.09729, verl's default clip_ratio_c


def objective(case: Case, kl: str = "low_var_kl") -> tuple[Tensor, Tensor]:
    """J of `case` and its gradient by the log-probability of every row: scalar and `(T,)`, float64.

    The rows are those of `batch(case)`; entropies are constants. A row that no counted response
    token belongs to has gradient 0. `ValueError` for a loss or a `kl` that is not written here.
    """
    data = batch(case)
    rows = data.rows.double().requires_grad_()
    J = total(case, data, rows, data.entropy.double(), kl=kl)
    return J.detach(), torch.autograd.grad(J, rows)[0]


def gradient(
    case: Case,
    model: Model,
    loss: Callable[[Tensor], Tensor] | None = None,
    kl: str = "low_var_kl",
) -> tuple[Tensor, dict[str, Tensor]]:
    """J of `case` on the tiny transformer and its gradient by every parameter, float64.

    Parameters are `weights(model, case.seed)` rounded to the case's dtype, and the trainer's
    numbers `batch(case, *model_outputs(...))`. `loss` takes all rows `(T,)` to a scalar and stands
    in for the policy loss of `case`, which must be written here without it; the KL and the
    entropy term are added to it. `ValueError` as `objective`.
    """
    rounded = weights(model, case.seed, getattr(torch, case.dtype))
    w = {name: value.double().requires_grad_() for name, value in rounded.items()}
    rows, entropy = model_outputs(case, model, w)
    J = total(case, batch(case, rows, entropy), rows, entropy, loss, kl)
    return J.detach(), dict(zip(w, torch.autograd.grad(J, list(w.values())), strict=True))


def model_outputs(case: Case, model: Model, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of all rows, end to end, `(T,)` each, in float64.

    `weights` of another dtype are widened first.
    """
    w, ids = {name: value.double() for name, value in weights.items()}, token_ids(case, model)
    rows = log_softmax(model, w, ids)
    return torch.cat(log_probs(rows, ids)), torch.cat(entropies(rows))


def total(
    case: Case,
    data: Batch,
    rows: Tensor,
    entropy: Tensor,
    loss: Callable[[Tensor], Tensor] | None = None,
    kl: str = "low_var_kl",
) -> Tensor:
    """J: the policy loss, plus `kl_coef` times the KL term, minus `entropy_coef` times entropy.

    `rows` and `entropy` are `(T,)`. Each term is aggregated in the case's mode. `ValueError` for a
    loss or a `kl` that is not written here.
    """
    for field, name, table in (("kl", kl, KL), ("loss", case.loss, LOSSES)):
        if name not in table and not (field == "loss" and loss):
            allowed = ", ".join(table)
            raise ValueError(f"{field} is {name!r}, allowed in the oracle is {allowed}")
    new, entropy = _counted_rows(case, data, rows), _counted_rows(case, data, entropy)
    old, ref, advantages, weights = (
        [x[: len(m)][m].double() for x, m in zip(table, _masks(case, data), strict=True)]
        for table in (data.old, data.ref, data.advantages, data.weights)
    )
    if loss:
        J = loss(rows)
    else:
        triples = zip(new, old, advantages, strict=True)
        losses = [LOSSES[case.loss](*triple, case) for triple in triples]
        if case.rollout_weights:
            losses = [x * w for x, w in zip(losses, weights, strict=True)]
        J = aggregate(losses, case)
    if case.kl_coef:
        divergences = [KL[kl](*pair) for pair in zip(new, ref, strict=True)]
        J = J + case.kl_coef * aggregate(divergences, case)
    if case.entropy_coef:
        J = J - case.entropy_coef * aggregate(entropy, case)
    return J


def aggregate(token_losses: list[Tensor], case: Case) -> Tensor:
    """J of the counted tokens' losses, one tensor `(n_s,)` for each sequence s.

    B is the number of sequences. One without a counted token adds 0 and still counts in B. For
    seq-mean-token-sum-norm the divisor is `loss_scale_factor` or, without one, the longest response
    of the mini-batch. `ValueError` for a mode that is not written here.
    """
    B = case.B
    total = sum(x.sum() for x in token_losses)
    width = max(s.response for s in case.sequences)
    sums = {
        "token-mean": lambda: total / sum(case.n),
        "token-sum": lambda: total,
        "seq-mean-token-sum": lambda: total / B,
        "seq-mean-token-mean": lambda: sum(x.mean() for x in token_losses if len(x)) / B,
        "seq-mean-token-sum-norm": lambda: total / B / (case.loss_scale_factor or width),
    }
    if case.mode not in sums:
        raise ValueError(f"mode is {case.mode!r}, allowed in the oracle is {', '.join(sums)}")
    return sums[case.mode]()


def gspo(new, old, advantages, case) -> Tensor:
    """GSPO's token losses of one sequence, `(n,)` from log-probabilities `(n,)`.

    The paper's GSPO-token, `s_t = sg[s] p_t / sg[p_t]` with `s = exp(mean log-ratio)`: every s_t
    has the value of s and the gradient of its own token. With one advantage for the whole
    sequence the mean over its tokens is the paper's sequence loss, value and gradient. Clamped
    from above as in verl 0.9.1, so that the exponential stays finite.
    """
    if not len(new):
        return new
    mean = (new - old).mean().detach()
    ratio = (mean + new - new.detach()).clamp(max=LOG_RATIO_MAX).exp()
    return _clipped(ratio, advantages, case)


def vanilla(new, old, advantages, case) -> Tensor:
    """PPO's token losses of one sequence, `(n,)`: clipped, and by the dual clip at A < 0."""
    ratio = (new - old).clamp(-RATIO_BOUND, RATIO_BOUND).exp()
    loss = _clipped(ratio, advantages, case)
    if not case.clip:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -DUAL_CLIP * advantages), loss)


def _masks(case, data):
    """For each sequence which of its response tokens count, bool `(response,)`."""
    return [m[: s.response] for m, s in zip(data.mask, case.sequences, strict=True)]


def _counted_rows(case, data, values):
    """For each sequence the values of the rows of its counted response tokens, from all `(T,)`."""
    parts = values.split([s.length for s in case.sequences])
    triples = zip(parts, case.sequences, _masks(case, data), strict=True)
    return [part[s.prompt - 1 : s.length - 1][mask] for part, s, mask in triples]


def _clipped(ratio, advantages, case):
    """`-min(r A, clip(r) A)` for ratios r and advantages A."""
    if not case.clip:
        return -advantages * ratio
    clipped = ratio.clamp(1 - case.clip_low, 1 + case.clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def k1(new, ref) -> Tensor:
    """The plain estimate of KL(new, ref) by token: the log-ratio."""
    return new - ref


def k3(new, ref) -> Tensor:
    """`r - log r - 1` with `r = p_ref / p`, never negative (eq. 4 of arXiv 2402.03300).

    verl bounds log r by 20 and the estimate by 10, which ratios of a batch do not reach.
    """
    return (ref - new).exp() - (ref - new) - 1


LOSSES = {"gspo": gspo, "vanilla": vanilla}
KL = {"low_var_kl": k3, "k3": k3, "kl": k1, "k1": k1}
