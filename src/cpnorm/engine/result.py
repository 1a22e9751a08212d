"""What the ranks of one step bring back, joined into one gradient and compared."""

from dataclasses import dataclass

import torch

from cpnorm.case import divisor

EXACT = 1e-13
"""Largest deviation of an exact float64 run, of its ratio and of its largest gradient."""


@dataclass(frozen=True)
class RankResult:
    """What one rank brings back.

    `gradients` are its shards by the parameter's name in the whole model, each with the dimension
    along which tensor parallelism cuts it. Only the first rank of a DP x CP group sends them, the
    others a digest. `K` is the count after Megatron's all-reduce (None in the averaging regime),
    `tokens` the routed tokens of each micro-batch and `loss` the sum of the losses of the replica's
    micro-batches (empty and None but on the last pipeline stage).
    """

    dp: int
    cp: int
    tp: int
    pp: int
    gradients: dict[str, tuple[torch.Tensor, int | None]]
    digest: str
    K: int | None
    tokens: tuple[int, ...]
    loss: float | None


@dataclass(frozen=True)
class Step:
    """One step of all ranks: the whole model's gradient, the loss J, Megatron's divisor K, and the
    routed tokens `t[d][m]`."""

    gradients: dict[str, torch.Tensor]
    loss: float
    K: int | None
    t: tuple[tuple[int, ...], ...]

    @property
    def T(self) -> int:
        """Routed tokens of the mini-batch."""
        return sum(map(sum, self.t))

    def predicted(self, C: int) -> float:
        """T/K as verl 0.9.1 reports its counts on C ranks; 1 in the averaging regime.

        With K = 0 Megatron does not divide at all, so that the factor is T.
        """
        return 1.0 if self.K is None else self.T / (divisor(self.t, C) or 1)


@dataclass(frozen=True)
class Agreement:
    """A step against a reference: least-squares `ratio` over all parameters, and the largest
    deviation of the step from that multiple, relative to its largest gradient: of all parameters
    (`residual`) and by parameter (`by_name`). `loss` is the error of J, relative to the larger of
    |J| and the largest gradient."""

    ratio: float
    by_name: dict[str, float]
    loss: float

    @property
    def residual(self) -> float:
        """Largest deviation of any parameter."""
        return max(self.by_name.values())


def join(name: str, shards: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    """The full matrix of which `shards` are the parts in rank order; `dim` None: all are alike,
    `ValueError` if not.

    The gate and up projections of `linear_fc1` are cut one by one, as Megatron-Core's SwiGLU needs.
    """
    if dim is None:
        if any(not torch.equal(shards[0], other) for other in shards[1:]):
            raise ValueError(f"the TP ranks differ in the gradient of {name}, which all hold whole")
        return shards[0]
    if not name.endswith("linear_fc1.weight"):
        return torch.cat(shards, dim)
    halves = zip(*(part.chunk(2, dim) for part in shards), strict=True)
    return torch.cat([torch.cat(half, dim) for half in halves], dim)


def joined(results: list[RankResult]) -> Step:
    """All ranks' results as one step. `ValueError` where ranks that must agree do not."""
    groups: dict[tuple[int, int], list[RankResult]] = {}
    for one in results:
        groups.setdefault((one.pp, one.tp), []).append(one)
    for (pp, tp), group in groups.items():
        if len({one.digest for one in group}) > 1:
            raise ValueError(f"the DP and CP ranks of stage {pp}, TP rank {tp} differ in gradients")
    firsts = [group[0] for _, group in sorted(groups.items())]
    shards: dict[str, list[torch.Tensor]] = {}
    cuts = {}
    for one in firsts:
        for name, (gradient, dim) in one.gradients.items():
            shards.setdefault(name, []).append(gradient)
            cuts[name] = dim
    last = [one for one in results if one.loss is not None and one.tp == one.cp == 0]
    last.sort(key=lambda one: one.dp)
    if len({one.K for one in results}) > 1:
        raise ValueError(f"the ranks differ in K: {sorted({one.K for one in results})}")
    return Step(
        gradients={name: join(name, parts, cuts[name]) for name, parts in shards.items()},
        loss=sum(one.loss for one in last) / len(last),
        K=results[0].K,
        t=tuple(one.tokens for one in last),
    )


def compare(step: Step, reference: dict[str, torch.Tensor], loss: float) -> Agreement:
    """`step` against a reference gradient, parameter by parameter, and its loss.

    `ValueError` if the two do not have the same parameters.
    """
    if step.gradients.keys() != reference.keys():
        odd = sorted(step.gradients.keys() ^ reference.keys())
        raise ValueError(f"these parameters are only on one side: {', '.join(odd)}")
    flat = {
        name: torch.stack([step.gradients[name].double().flatten(), whole.double().flatten()])
        for name, whole in reference.items()
    }
    got, want = torch.cat(list(flat.values()), dim=1)
    ratio = float(got @ want / (want @ want))
    largest = got.abs().max()
    by_name = {
        name: float((pair[0] - ratio * pair[1]).abs().max() / largest)
        for name, pair in flat.items()
    }
    scale = max(abs(loss), float(want.abs().max()))
    return Agreement(ratio, by_name, abs(step.loss - loss) / scale)
