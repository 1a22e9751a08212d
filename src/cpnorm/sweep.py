"""The check over every loss, aggregation mode and context-parallel size."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

from tqdm import tqdm

from .case import Case, Sequence, losses, modes
from .check import Record, check, unsharded

CP_SIZES = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128)
SEQUENCES = (
    Sequence(3, 5),
    Sequence(4, 9, (1, 1, 1, 0, 0, 1, 1, 0, 1)),
    Sequence(1, 1),
    Sequence(150, 6),
    Sequence(70, 3),
    Sequence(20, 13, (1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0)),
    Sequence(5, 4, (0, 0, 0, 0)),
    Sequence(7, 5),
)
"""No micro-batch has just two counted tokens: `kl_cov` would turn on a rounding there. In each
`clip_cov` has more tokens to draw from than it takes.
"""


def full_sweep() -> list[Case]:
    """Every loss x mode x clipping x rollout weights x CP size, one case each.

    Two replicas of two micro-batches; a fully masked sequence, one-token responses, responses
    shorter than CP, masked tool tokens, and prompts that straddle chunk borders.
    """
    factors = [(mode, 7) for mode in modes()] + [("seq-mean-token-sum-norm", None)]
    options = itertools.product(losses(), factors, (True, False), (False, True), CP_SIZES)
    return [
        Case(
            sequences=SEQUENCES,
            dp=2,
            cp=cp,
            micro_batch_size=2,
            loss=loss,
            mode=mode,
            loss_scale_factor=factor,
            clip=clip,
            clip_low=0.05,
            clip_high=0.1,
            rollout_weights=weights,
        )
        for loss, (mode, factor), clip, weights, cp in options
    ]


def sweep(cases: Iterable[Case], progress: bool = False) -> list[Record]:
    """`check` each case; neighbours that differ only in cp, tp or layout share a reference."""
    records, last, reference = [], None, None
    for case in tqdm(cases, unit="case", leave=False, disable=not progress):
        key = replace(case, cp=1, tp=1, layout="zigzag")
        if key != last:
            last, reference = key, unsharded(key)
        records.append(check(case, reference))
    return records


def column(case: Case) -> str:
    """The case's aggregation mode, and whether its length divisor is left to verl."""
    norm = case.mode == "seq-mean-token-sum-norm" and case.loss_scale_factor is None
    return case.mode + ", no factor" * norm


def tabulate(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records by loss and column."""
    cells = {}
    for record in records:
        cells.setdefault((record.case.loss, column(record.case)), []).append(record)
    return cells
