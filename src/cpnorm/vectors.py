"""Gradients as vectors: end to end, as a multiple of another, at an angle to it."""

from collections.abc import Iterable

import torch
from torch import Tensor


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """All parameters' gradients end to end."""
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def multiple(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Least-squares ratio of two flat gradients, and the largest deviation from that multiple,
    relative to the largest entry of `found`."""
    ratio = float(found @ wanted / (wanted @ wanted))
    return ratio, float((found - ratio * wanted).abs().max() / found.abs().max())


def angle(a: Tensor, b: Tensor) -> float:
    """Angle of two flat gradients in degrees, by the tangent of its half, exact for small ones."""
    a, b = a / a.norm(), b / b.norm()
    return float(torch.rad2deg(2 * torch.atan2((a - b).norm(), (a + b).norm())))


def distinct(gradients: Iterable[Tensor], bound: float) -> list[Tensor]:
    """The first of every kind: gradients of one shape are alike if no entry differs by more than
    `bound` of their largest one. Bits would tell round-off apart."""
    kinds = []
    for one in gradients:
        sizes = (max(float(one.abs().max()), float(kind.abs().max())) for kind in kinds)
        pairs = zip(kinds, sizes, strict=True)
        if not any((one - kind).abs().max() <= bound * size for kind, size in pairs):
            kinds.append(one)
    return kinds
