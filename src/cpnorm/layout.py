"""Which context-parallel rank owns which row, written from the definition.

A row is a position of a packed sequence, prompt or response. Nothing here is verl's: the tests
compare it with what verl 0.9.1's `preprocess_thd_engine` really hands to each rank.
"""

import functools

import torch


def alignment(C: int, tp: int = 1, layout: str = "zigzag") -> int:
    """What a sequence's length is padded to a multiple of.

    Zigzag cuts a sequence into 2C chunks if C > 1, and tensor parallelism (sequence parallel) cuts
    each rank's rows again. As `align_size` in verl 0.9.1's `preprocess_thd_engine`, without FP8.
    `ValueError` for sizes below 1 or an unknown layout.
    """
    if C < 1 or tp < 1:
        raise ValueError(f"C is {C} and tp is {tp}, allowed is 1 or more")
    if layout not in ("zigzag", "contiguous"):
        raise ValueError(f"layout is {layout!r}, allowed is zigzag, contiguous")
    return tp * C * (2 if layout == "zigzag" and C > 1 else 1)


def padded(length: int, C: int, tp: int = 1, layout: str = "zigzag") -> int:
    """Rows of a sequence of `length` tokens after padding, the least multiple of `alignment`."""
    align = alignment(C, tp, layout)
    return -(-length // align) * align


def zigzag(length: int, C: int, c: int) -> torch.Tensor:
    """Rows of a padded sequence that rank `c` owns, in local order, int64 `(length // C,)`.

    Chunk `c` and chunk `2C - 1 - c` of `2C` equal chunks; all rows if C is 1. `ValueError` unless
    `0 <= c < C` and `2C` divides `length` (or C is 1). As verl 0.9.1's `preprocess_thd_engine`.
    """
    _check(length, 2 * C if C > 1 else 1, C, c)
    if C == 1:
        return torch.arange(length)
    size = length // (2 * C)
    chunks = (c, 2 * C - 1 - c)
    return torch.cat([torch.arange(k * size, (k + 1) * size) for k in chunks])


def contiguous(length: int, C: int, c: int) -> torch.Tensor:
    """Rows that rank `c` owns of a packed, padded micro-batch, int64 `(length // C,)`.

    The c-th of C equal intervals of the whole buffer, whatever sequences lie in it. `ValueError`
    unless `0 <= c < C` and C divides `length`. As `cp_layout="contiguous"` in verl 0.9.1.
    """
    _check(length, C, C, c)
    return torch.arange(length // C) + c * (length // C)


@functools.lru_cache(maxsize=4096)
def owners(lengths: tuple[int, ...], C: int, tp: int = 1, layout: str = "zigzag") -> torch.Tensor:
    """Which rank owns which real row of a micro-batch: bool `(C, sum(lengths))`.

    `lengths` are the tokens of its sequences, prompt and response. Rows follow each other as in
    verl's packed micro-batch, padding left out. The tensor is shared between calls: do not write
    into it. `ValueError` for no sequences or a length below 1.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths is {lengths}, allowed is at least one length, each 1 or more")
    sizes = [padded(length, C, tp, layout) for length in lengths]
    own = torch.zeros(C, sum(sizes), dtype=torch.bool)
    for c in range(C):
        if layout == "contiguous":
            own[c, contiguous(sum(sizes), C, c)] = True
            continue
        start = 0
        for size in sizes:
            own[c, start + zigzag(size, C, c)] = True
            start += size
    real = [torch.arange(size) < n for size, n in zip(sizes, lengths, strict=True)]
    return own[:, torch.cat(real)]


def _check(length, parts, C, c):
    if C < 1 or not 0 <= c < C:
        raise ValueError(f"c is {c} of C = {C} ranks, allowed is 0 <= c < C")
    if length < 0 or length % parts:
        raise ValueError(f"length is {length}, allowed is a multiple of {parts}")
