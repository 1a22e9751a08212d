"""The answer without any parallelism, from the papers, in plain torch. Nothing of verl is used.

GSPO (arXiv 2507.18071) and PPO-clip (arXiv 1707.06347) with its dual clip (arXiv 1912.09729).
`J` here is what is minimised, so it is minus the objective that the papers maximise.
"""

import torch

from .batch import batch
from .case import Case

RATIO_BOUND = 20.0  # verl clamps PPO's log-ratio to +-20
LOG_RATIO_MAX = 10.0  # and GSPO's from above to 10, which real ratios do not reach
DUAL_CLIP = 3.0  # c of arXiv 1912.09729, verl's default clip_ratio_c


def objective(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """J of `case` and its gradient by the log-probability of every row: scalar and `(T,)`, float64.

    A row that no counted response token belongs to has gradient 0. `ValueError` for a loss that
    is not written here.
    """
    if case.loss not in LOSSES:
        allowed = ", ".join(LOSSES)
        raise ValueError(f"loss is {case.loss!r}, allowed in the oracle is {allowed}")
    data = batch(case)
    rows = data.rows.to(torch.float64).requires_grad_()
    token_losses, start = [], 0
    for s, seq in enumerate(case.sequences):
        first, counted = start + seq.prompt - 1, data.mask[s, : seq.response]
        new = rows[first : first + seq.response][counted]
        old, advantages, weights = (
            column[s, : seq.response][counted].to(torch.float64)
            for column in (data.old, data.advantages, data.weights)
        )
        loss = LOSSES[case.loss](new, old, advantages, case)
        token_losses.append(loss * weights if case.rollout_weights else loss)
        start += seq.length
    J = aggregate(token_losses, case)
    return J.detach(), torch.autograd.grad(J, rows)[0]


def aggregate(token_losses: list[torch.Tensor], case: Case) -> torch.Tensor:
    """J of the counted tokens' losses, one tensor `(n_s,)` for each sequence s.

    N is the number of counted tokens, B that of sequences. A sequence without a counted token
    adds 0 and still counts in B. For seq-mean-token-sum-norm the divisor is `loss_scale_factor`
    or, without one, the longest response of the mini-batch.
    """
    N, B = sum(case.n), case.B
    total = sum(x.sum() for x in token_losses)
    width = max(s.response for s in case.sequences)
    return {
        "token-mean": lambda: total / N,
        "token-sum": lambda: total,
        "seq-mean-token-sum": lambda: total / B,
        "seq-mean-token-mean": lambda: sum(x.mean() for x in token_losses if len(x)) / B,
        "seq-mean-token-sum-norm": lambda: total / B / (case.loss_scale_factor or width),
    }[case.mode]()


def gspo(new, old, advantages, case) -> torch.Tensor:
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


def vanilla(new, old, advantages, case) -> torch.Tensor:
    """PPO's token losses of one sequence, `(n,)`: clipped, and by the dual clip at A < 0."""
    ratio = (new - old).clamp(-RATIO_BOUND, RATIO_BOUND).exp()
    loss = _clipped(ratio, advantages, case)
    if not case.clip:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -DUAL_CLIP * advantages), loss)


def _clipped(ratio, advantages, case):
    """`-min(r A, clip(r) A)` for ratios r and advantages A."""
    if not case.clip:
        return -advantages * ratio
    clipped = ratio.clamp(1 - case.clip_low, 1 + case.clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


LOSSES = {"gspo": gspo, "vanilla": vanilla}
