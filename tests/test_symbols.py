"""Every rewriting rule of `cpnorm.symbols` against exact rational arithmetic."""

from fractions import Fraction

import pytest
import sympy as sp
from hypothesis import given
from hypothesis import strategies as st
from sympy import IndexedBase, Rational, Sum

from cpnorm import symbols as S

x, y = IndexedBase("x"), IndexedBase("y")
LEAVES = [
    S.a[S.s, S.d, S.m],
    S.p[S.c, S.s, S.i],
    S.w[S.s, S.i],
    S.ell[S.s, S.i],
    S.n[S.s],
    S.mu[S.s],
    x[S.c],
    x[S.d, S.m],
    S.B,
    S.T / S.K,
    sp.Integer(-3),
]
seeds = st.integers(0, 10**6)


@st.composite
def closed_sums(draw) -> sp.Expr:
    """Sums of products of sums in which every index is bound, nested or not."""

    def product(letters_taken: set, depth: int) -> sp.Expr:
        factors = draw(st.lists(st.sampled_from(LEAVES), min_size=1, max_size=3))
        body = sp.Mul(*factors)
        free = [t for t in S.WHOLE if t[0] in body.free_symbols and t[0] not in letters_taken]
        extra = [t for t in S.WHOLE if t not in free and t[0] not in letters_taken]
        free += draw(st.lists(st.sampled_from(extra), max_size=1)) if extra else []
        taken = letters_taken | {t[0] for t in free}
        if depth and len(taken) < len(S.WHOLE):
            body = body * product(taken, depth - 1)
        if draw(st.booleans()):
            body = body + draw(st.integers(-2, 2))
        return Sum(body, *draw(st.permutations(free))) if free else body

    return sp.Add(
        *(product(set(), draw(st.integers(0, 1))) for _ in range(draw(st.integers(1, 2))))
    )


@given(closed_sums(), seeds)
def test_flat_keeps_the_value(e, seed):
    at = S.instance(seed)
    assert S.evaluate(S.flat(e), at) == S.evaluate(e, at)


@given(closed_sums(), seeds)
def test_equal_sees_a_difference(e, seed):
    assert S.equal(e, S.flat(e))
    assert not S.equal(e, e + 1)
    assert not S.equal(e, 2 * e) or S.evaluate(e, S.instance(seed)) == 0


@given(seeds)
def test_innermost_exchanges_sums(seed):
    at = S.instance(seed)
    e = Sum(S.p[S.c, S.s, S.i] * S.ell[S.s, S.i], S.ROWS) * S.D / S.B
    e = Sum(Sum(e * S.a[S.s, S.d, S.m], S.SEQUENCES), S.RANKS, S.MICRO_BATCHES, S.REPLICAS)
    for inner in ([S.RANKS], [S.MICRO_BATCHES, S.REPLICAS], [S.ROWS], [S.SEQUENCES]):
        moved = S.innermost(e, *inner)
        assert S.equal(e, moved)
        assert S.evaluate(moved, at) == S.evaluate(e, at)


@given(seeds)
def test_splitting_over_a_partition(seed):
    """The two identities hold in every instance, and using them keeps the value."""
    at = S.instance(seed)
    for (identity, one), over in ((*S.ASSIGNMENT.items(), S.mu), (*S.OWNERSHIP.items(), S.mu)):
        for k in range(at[S.B]):
            for r in range(at[S.N]):
                assert S.evaluate(identity, at | {S.s: k, S.i: r}) == one
        whole = Sum(over[S.s] * identity, S.SEQUENCES, S.ROWS)
        assert S.evaluate(whole, at) == S.evaluate(whole.xreplace({identity: one}), at)


def test_innermost_refuses_an_index_that_is_not_summed():
    with pytest.raises(ValueError, match="not summed over all of"):
        S.innermost(Sum(S.mu[S.s], S.SEQUENCES), S.RANKS)


def test_a_letter_used_twice_is_refused():
    total = Sum(S.mu[S.s], S.SEQUENCES)
    with pytest.raises(ValueError, match="index s is summed over in one factor"):
        S.flat(total * S.mu[S.s])


def test_limits_that_depend_on_an_index_are_refused():
    triangle = Sum(x[S.s, S.i], (S.i, 0, S.s), S.SEQUENCES)
    with pytest.raises(ValueError, match="depend on one another"):
        S.flat(triangle)


@given(st.integers(1, 5), seeds)
def test_chain_rule_on_polynomials(size, seed):
    """F = (sum of (k + 1) y_k^3) (product of all y): the rule against explicit derivatives."""
    at = S.instance(seed)
    xs, own = sp.symbols(f"x:{size}"), [S.evaluate(y[k], at) for k in range(size)]
    rows = [Rational(o) * v + (1 - Rational(o)) * S.sg(v) for v, o in zip(xs, own, strict=True)]

    def loss(r):
        return sp.Add(*((k + 1) * v**3 for k, v in enumerate(r))) * sp.Mul(*r)

    partials = [sp.diff(loss(xs), v) for v in xs]
    row = y[S.i] * x[S.i] + (1 - y[S.i]) * S.sg(x[S.i])
    ruled = S.chain_rule(IndexedBase("g")[S.i], row, x[S.j], (S.i, 0, size - 1))
    for k, v in enumerate(xs):
        table = {IndexedBase("g")[S.j]: partials[k], y[S.j]: Rational(own[k])}
        direct = S.value(sp.diff(loss(rows), v))
        assert sp.expand(direct - ruled.xreplace(table)) == 0


@given(st.integers(1, 6), seeds)
def test_gradient_of_an_indexed_sum(size, seed):
    """The derivative of a sum of symbolic length against that of the written-out sum."""
    k, length = sp.symbols("k", integer=True, nonnegative=True), sp.Symbol("n_0", integer=True)
    e = Sum(y[S.i] * x[S.i] ** 2 * S.sg(Sum(x[S.j], (S.j, 0, length - 1))), (S.i, 0, length - 1))
    xs, ys = sp.symbols(f"x:{size}"), [S.evaluate(y[r], S.instance(seed)) for r in range(size)]
    table = {x[r]: v for r, v in enumerate(xs)} | {y[r]: Rational(v) for r, v in enumerate(ys)}
    explicit = e.subs(length, size).doit().xreplace(table)
    for r, v in enumerate(xs):
        symbolic = S.gradient(e, x[k]).subs({length: size, k: r}).doit().xreplace(table)
        assert sp.expand(symbolic - S.value(sp.diff(explicit, v))) == 0


def test_stop_gradient_has_its_value_and_no_derivative():
    v = sp.Symbol("v")
    assert S.value(S.sg(v**2) + v) == v**2 + v
    assert sp.diff(S.sg(v**2), v) == 0
    assert S.gradient(v * S.sg(v), v) == v


def test_pick_takes_the_one_term():
    delta = sp.KroneckerDelta(S.i, S.j)
    assert S.pick(Sum(delta * x[S.i] ** 2, S.ROWS)) == x[S.j] ** 2
    assert S.pick(Sum(x[S.i], S.ROWS)) == Sum(x[S.i], S.ROWS)


@given(seeds)
def test_an_instance_is_a_mini_batch(seed):
    at = S.instance(seed)
    for k in range(at[S.B]):
        counted = sum(at[S.w](k, r) for r in range(at[S.N]))
        assert counted == at[S.n](k) >= 1


def test_evaluate_says_what_it_cannot_do():
    with pytest.raises(TypeError, match="cannot evaluate"):
        S.evaluate(sp.exp(S.B), S.instance(0))
    with pytest.raises(TypeError, match="cannot evaluate s"):
        S.evaluate(S.mu[S.s], S.instance(0))
    assert S.evaluate(Rational(2, 3) ** 2, S.instance(0)) == Fraction(4, 9)


def test_typesetting_names_whole_ranges_by_letter():
    assert S.typeset(Sum(S.mu[S.s], S.SEQUENCES) / S.B).startswith(r"\frac{1}{B} \sum_{s}")
    assert "N - 2" in S.typeset(Sum(x[S.i], (S.i, 0, S.N - 2)))
    assert S.chain("G", ("why", S.B)).data == r"\begin{aligned}G &= B && \text{why}\end{aligned}"
    assert S.show("J", S.B).data == "J = B"


@given(seeds, st.integers(1, 4))
def test_weights_are_those_of_verl(seed, replicas):
    """`WEIGHTS` against the installed `agg_loss`, for a random mask and random losses."""
    torch = pytest.importorskip("torch")
    from verl.trainer.ppo.core_algos import agg_loss

    at = S.instance(seed) | {S.D: replicas}
    mask = torch.tensor([[at[S.w](k, r) for r in range(at[S.N])] for k in range(at[S.B])]).bool()
    losses = torch.tensor(
        [[float(S.evaluate(S.ell[k, r], at)) for r in range(at[S.N])] for k in range(at[S.B])],
        dtype=torch.float64,
    )
    token_sum = Sum(S.w[S.s, S.i] * S.ell[S.s, S.i], S.ROWS)
    for mode, weight in S.WEIGHTS.items():
        ours = float(S.evaluate(S.D * Sum(weight * token_sum, S.SEQUENCES), at))
        verls = agg_loss(
            losses, mask, mode, dp_size=replicas, batch_num_tokens=int(mask.sum()),
            global_batch_size=at[S.B], loss_scale_factor=at[S.L],
        )  # fmt: skip
        torch.testing.assert_close(verls.item(), ours, rtol=1e-14, atol=1e-14)
