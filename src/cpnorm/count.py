"""What rounding the token count down does to the gradient's scale, in exact fractions.

As verl 0.9.1's `postprocess_micro_batch_func` without dynamic CP: each of C ranks reports `t // C`.
"""

from fractions import Fraction

from cpnorm.case import divisor


def ratio(t: tuple[tuple[int, ...], ...], C: int) -> Fraction:
    """How many times as large the gradient is: T/K for routed tokens `t[d][m]` on C ranks.

    T itself if K is 0, since Megatron-Core's `finalize_model_grads` then does not divide.
    """
    return Fraction(sum(map(sum, t)), divisor(t, C) or 1)


def worst(tokens: int, C: int) -> Fraction:
    """Largest T/K - 1 of micro-batches that lie with `tokens` between two multiples of C.

    They keep the lower multiple and lose C - 1 tokens each. Their number does not matter.
    `ValueError` if C is below 1 or `tokens` below C.
    """
    if C < 1 or tokens < C:
        raise ValueError(f"C is {C} and tokens is {tokens}, allowed is 1 <= C <= tokens")
    return Fraction(C - 1, C * (tokens // C))


def expected(tokens: int, C: int) -> Fraction:
    """T/K - 1 on average over `t mod C` uniform on 0 ... C - 1; half of `worst`."""
    return worst(tokens, C) / 2


def reported(t: int, C: int) -> tuple[int, ...]:
    """The repair: what each of C ranks reports for t tokens so that the sum is t."""
    return tuple((t + C - 1 - c) // C for c in range(C))
