"""The numbers of a `Case`: made from its seed, the same for every topology."""

from dataclasses import dataclass

import torch

from .case import Case


@dataclass(frozen=True)
class Batch:
    """Values of the mini-batch, in the case's dtype.

    `rows (T,)` are log-probabilities, one for each routed token; row `prompt - 1 + j` of a
    sequence belongs to its response token j. `entropy (T,)` likewise. The others are
    `(B, W)`, W the longest response, and hold what the trainer brings for response token j:
    log-probabilities under the old and the reference policy, advantages (one a token), rollout
    weights, and the bool mask. Columns past a response are 0.
    """

    rows: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor


def batch(
    case: Case,
    rows: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    device: str = "cpu",
) -> Batch:
    """The batch of `case`, a function of its sequences, seed and dtype, and of what is given, only.

    `rows` and `entropy`, `(T,)`, are a model's, drawn where they are not given; they are detached.
    Everything else has the same noise either way, drawn on the CPU and then put on `device`.
    `ValueError` for another shape.

    Log-ratios have standard deviation 0.15, so that clip bounds near 0.1 cut some tokens and
    spare others. Drawn rows, and all log-probabilities of the other policies, stay below -0.01.
    """
    for name, given in (("rows", rows), ("entropy", entropy)):
        if given is not None and given.shape != (case.T,):
            raise ValueError(f"{name} has shape {tuple(given.shape)}, allowed is ({case.T},)")
    g = torch.Generator().manual_seed(case.seed)
    W = max(s.response for s in case.sequences)
    drawn = torch.rand(2, case.T, generator=g, dtype=torch.float64)
    rows = -0.05 - 2 * drawn[0] if rows is None else rows.detach().double()
    entropy = 0.1 + 2 * drawn[1] if entropy is None else entropy.detach().double()
    noise = torch.randn(3, case.B, W, generator=g, dtype=torch.float64)
    weights = 0.5 + 1.5 * torch.rand(case.B, W, generator=g, dtype=torch.float64)
    new = torch.zeros(case.B, W, dtype=torch.float64)
    real = torch.zeros(case.B, W, dtype=torch.bool)
    mask = torch.zeros(case.B, W, dtype=torch.bool)
    start = 0
    for s, seq in enumerate(case.sequences):
        first = start + seq.prompt - 1
        new[s, : seq.response] = rows[first : first + seq.response]
        real[s, : seq.response] = True
        mask[s, : seq.response] = torch.tensor(seq.counted, dtype=torch.bool)
        start += seq.length
    old, ref = (new + 0.15 * noise[:2]).clamp(max=-0.01)
    values = (rows, entropy, old * real, ref * real, noise[2] * real, weights * real)
    return Batch(*(v.to(device, getattr(torch, case.dtype)) for v in values), mask.to(device))
