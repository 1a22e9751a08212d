"""Named faults put into cpnorm, to show that the checks see them. Each is a context manager.

`MUTANTS` maps a name to the fault and to the check that must see it: a function that is true on
sound code.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from . import check, layout, losses
from .case import Case, Sequence

CASE = Case(
    sequences=(Sequence(3, 5), Sequence(2, 9), Sequence(1, 1), Sequence(7, 4)),
    dp=2,
    cp=2,
    loss="gspo",
    clip_low=0.05,
    clip_high=0.1,
)


def ranks_agree() -> bool:
    """Loss and gradient of every rank, for a small case in both regimes."""
    cases = (CASE, replace(CASE, regime="averaging"))
    return all(check.check(case).passed for case in cases)


def layout_agrees() -> bool:
    """Ownership is the one that verl's `preprocess_thd_engine` deals out."""
    from . import verl_layout

    lengths = tuple(s.length for s in CASE.sequences)
    return all(
        torch.equal(layout.owners(lengths, C, tp), verl_layout.owners(lengths, C, tp))
        for C, tp in ((2, 1), (3, 2), (4, 1))
    )


@contextmanager
def swapped_chunk():
    """Rank c takes chunks c and C + c: a partition still, but not verl's."""

    def zigzag(length, C, c):
        chunks = torch.arange(length).view(2 * C, -1)
        return torch.cat([chunks[c], chunks[C + c]])

    with _without_cache(), mock.patch.object(layout, "zigzag", zigzag):
        yield


@contextmanager
def overlapping_chunk():
    """Rank c takes chunk c twice, so that the second half of a sequence has no owner."""

    def zigzag(length, C, c):
        return torch.arange(length).view(2 * C, -1)[c].repeat(2)

    with _without_cache(), mock.patch.object(layout, "zigzag", zigzag):
        yield


def non_detached_gather():
    """Every rank differentiates all rows."""
    return mock.patch.object(check, "gather", lambda rows, own: rows)


def dropped_d():
    """The loss is scaled with T in place of T/D: one factor D too many."""
    sound = check.scaled
    return mock.patch.object(check, "scaled", lambda case, loss: sound(case, loss) * case.D)


def changed_sign():
    """The loss goes into backward with the other sign."""
    sound = check.scaled
    return mock.patch.object(check, "scaled", lambda case, loss: -sound(case, loss))


def local_means():
    """Each rank sees only its own share of the response mask, and divides by that."""

    def mask_seen(micro, own):
        return micro.mask & (losses.columns(own.long(), micro) > 0)

    return mock.patch.object(check, "mask_seen", mask_seen)


@contextmanager
def _without_cache():
    layout.owners.cache_clear()
    try:
        yield
    finally:
        layout.owners.cache_clear()


MUTANTS = {
    "swapped chunk": (swapped_chunk, layout_agrees),
    "overlapping chunk": (overlapping_chunk, ranks_agree),
    "non-detached gather": (non_detached_gather, ranks_agree),
    "dropped D": (dropped_d, ranks_agree),
    "changed sign": (changed_sign, ranks_agree),
    "local means": (local_means, ranks_agree),
}
