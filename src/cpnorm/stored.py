"""Numbers as notebooks store them: with no more digits than every machine agrees on.

The last digits of a float hang on the instruction set, the number of threads and the build of the
library that made it. What a page takes from a notebook is rounded here. What is nothing but
round-off is not stored at all: the cell asserts that it is within a bound, and stores the bound.
"""

import math
from typing import Any

import myst_nb

DIGITS = 6  # significant; tests/test_notebooks.py refuses more


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """A float, also numpy's or torch's, to so many significant `digits`, 1 to `DIGITS`.

    Fewer digits are for what was made in float32, which has 7. Integers, fractions, text and
    pictures stay as they are. `ValueError` for other `digits`, and for a float that is not finite.
    """
    if not 1 <= digits <= DIGITS:
        raise ValueError(f"digits is {digits}, allowed is 1 to {DIGITS}")
    value = value.item() if hasattr(value, "item") else value  # one number of numpy's or torch's
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number to store")
    return float(f"{value:.{digits}g}")


def glue(name: str, value: Any, digits: int = DIGITS, display: bool = True) -> None:
    """Store the `rounded` value under `name`, for a page to take; `display` it in the notebook too.

    Errors as of `rounded`.
    """
    myst_nb.glue(name, rounded(value, digits), display)


def below(value: float) -> str:
    """For what is round-off and still worth a look: "≤ 1e-04" for the next power of ten.

    `ValueError` for what is not above 0.
    """
    if not value > 0:
        raise ValueError(f"{value} has no power of ten above it, allowed is what is above 0")
    return f"≤ {10.0 ** math.ceil(math.log10(value)):.0e}"
