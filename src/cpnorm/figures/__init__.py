"""Pictures of the book, matplotlib only, readable at a width of 700 pixels: a module a topic."""

from math import log10

FLOOR = -17.0  # decade that stands for an error of exactly 0


def decade(error: float) -> float:
    """log10 of an error, `FLOOR` for less and for 0."""
    return max(log10(error), FLOOR) if error > 0 else FLOOR
