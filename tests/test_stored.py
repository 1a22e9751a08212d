"""What a notebook stores is rounded, and what it rounds away is known."""

from fractions import Fraction

import myst_nb
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpnorm import stored

EXACT = 0.1 + 0.2


@pytest.mark.parametrize("value", [EXACT, np.float64(EXACT), torch.tensor(EXACT).double()])
def test_float_of_any_library(value):
    assert repr(stored.rounded(value)) == "0.3"


def test_digits_are_significant():
    assert stored.rounded(1.2760002292704848) == 1.276
    assert stored.rounded(0.01201629638671875) == 0.0120163
    assert stored.rounded(123456789.0) == 123457000.0
    assert stored.rounded(-2.3456e-9, digits=2) == -2.3e-9


@pytest.mark.parametrize("value", [7, True, 10**9, Fraction(1234567, 10**7), "1.23456789", None])
def test_what_is_no_float_stays(value):
    assert stored.rounded(value) is value


def test_integer_of_a_library_is_one():
    assert repr(stored.rounded(np.int64(1234567))) == "1234567"


@given(st.floats(1e-300, 1e300), st.integers(1, stored.DIGITS))
def test_rounding_is_close_and_final(value, digits):
    once = stored.rounded(value, digits)
    assert abs(once - value) <= 0.5001 * 10.0 ** (1 - digits) * value
    assert stored.rounded(once, digits) == once


@pytest.mark.parametrize("digits", [0, stored.DIGITS + 1])
def test_other_digits_are_refused(digits):
    with pytest.raises(ValueError, match=f"digits is {digits}, allowed is 1 to 6"):
        stored.rounded(1.0, digits)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(-torch.inf)])
def test_no_number_is_refused(value):
    with pytest.raises(ValueError, match="is no number to store"):
        stored.rounded(value)


def test_glue_rounds(monkeypatch):
    glued = []
    monkeypatch.setattr(myst_nb, "glue", lambda *arguments: glued.append(arguments))
    stored.glue("a", EXACT)
    stored.glue("b", np.float32(1 / 3), digits=3, display=False)
    assert glued == [("a", 0.3, True), ("b", 0.333, False)]


@given(st.floats(1e-300, 1e300))
def test_below_is_the_next_power_of_ten(value):
    said = stored.below(value)
    power = float(said.removeprefix("≤ "))
    assert value <= power * (1 + 1e-15)
    assert power < 10.01 * value


def test_below_has_one_digit():
    assert stored.below(3.2e-5) == "≤ 1e-04"
    assert stored.below(1e-13) == "≤ 1e-13"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_below_needs_a_power(value):
    with pytest.raises(ValueError, match="has no power of ten above it"):
        stored.below(value)
