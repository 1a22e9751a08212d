"""The symbols and the rewriting rules that the SymPy notebooks share.

Every index starts at 0, as in the code. Sizes are symbolic, and so are the tables: which sequence
lies in which micro-batch, which rank owns which row, which token the mask keeps. What SymPy does
not do by itself is a rule below: it takes an expression and returns one. `tests/test_symbols.py`
holds each rule against exact rational arithmetic.
"""

from collections.abc import Mapping
from fractions import Fraction
from math import prod
from random import Random

import sympy as sp
from IPython.display import Math
from sympy import Add, Expr, IndexedBase, KroneckerDelta, Mul, Sum, symbols
from sympy.concrete.delta import deltasummation
from sympy.printing.latex import LatexPrinter

B, D, C, M, N, T, K, L = symbols("B D C M N T K L", integer=True, positive=True)
s, d, m, c, i, j = symbols("s d m c i j", integer=True, nonnegative=True)
theta = sp.Symbol("theta", real=True)  # one coordinate of the parameters, any of them

a = IndexedBase("a")  # a[s, d, m] = 1 where sequence s lies in micro-batch m of replica d, else 0
p = IndexedBase("p")  # p[c, s, i] = 1 where CP rank c owns row i of sequence s, else 0
w = IndexedBase("w")  # w[s, i] = 1 where row i of sequence s predicts a counted token, else 0
n = IndexedBase("n")  # n[s]: counted tokens of sequence s, the sum of w[s, i] over i
ell = IndexedBase(r"\ell")  # ell[s, i]: loss of the token that row i of sequence s predicts
mu = IndexedBase(r"\mu")  # mu[s]: mean loss of sequence s
omega = IndexedBase(r"\omega")  # omega[s]: weight of a token of sequence s in the objective

SEQUENCES, REPLICAS, MICRO_BATCHES = (s, 0, B - 1), (d, 0, D - 1), (m, 0, M - 1)
RANKS, ROWS = (c, 0, C - 1), (i, 0, N - 1)
WHOLE = (REPLICAS, MICRO_BATCHES, RANKS, SEQUENCES, ROWS)

ASSIGNMENT = {Sum(a[s, d, m], MICRO_BATCHES, REPLICAS): sp.S.One}
"""Every sequence lies in exactly one micro-batch of one replica."""

OWNERSHIP = {Sum(p[c, s, i], RANKS): sp.S.One}
"""Every row belongs to exactly one CP rank. The chapter on ownership proves it for the layouts."""

WEIGHTS: Mapping[str, Expr] = {
    "token-mean": 1 / Sum(n[s], SEQUENCES),
    "token-sum": sp.S.One,
    "seq-mean-token-sum": 1 / B,
    "seq-mean-token-sum-norm": 1 / (B * L),
    "seq-mean-token-mean": 1 / (B * n[s]),
}
"""`omega[s]` for every `loss_agg_mode` of verl 0.9.1's `agg_loss`, its factor `dp_size` left out.
`L` is `loss_scale_factor`."""


class sg(sp.Function):
    """Stop-gradient: the value of its argument with derivative zero, as `torch.Tensor.detach`."""

    def fdiff(self, argindex: int = 1) -> Expr:
        return sp.S.Zero

    def _latex(self, printer, exp=None) -> str:
        return rf"\operatorname{{sg}}\left({printer.doprint(self.args[0])}\right)"


def value(e: Expr) -> Expr:
    """What a forward pass returns: every stop-gradient in `e` replaced by its argument."""
    return e.replace(sg, lambda x: x)


def pick(e: Expr) -> Expr:
    """Each sum over a Kronecker delta replaced by its one term; that index must lie in range."""

    def one(term: Expr, *limits: tuple) -> Expr:
        for limit in limits:
            term = deltasummation(sp.expand(term), tuple(limit), no_piecewise=True)
        return term

    return e.replace(lambda x: isinstance(x, Sum) and x.has(KroneckerDelta), lambda x: one(*x.args))


def gradient(e: Expr, x: Expr) -> Expr:
    """What autograd returns for `e` with respect to `x`: stop-gradients held fixed while
    differentiating, values put in afterwards. An index of `x` must lie in the range of every sum.
    """
    return value(pick(sp.diff(e, x)))


def chain_rule(partial: Expr, argument: Expr, x: Expr, *over: tuple) -> Expr:
    """Gradient with respect to `x` of F(arguments), F any differentiable function.

    `partial` is the derivative of F by one argument, at the forward values, and `argument` is that
    argument, both in the letters of `over`: the sum over `over` of partial · d argument / d x.
    """
    return flat(value(pick(Sum(partial * sp.diff(argument, x), *over))))


def terms(e: Expr) -> list[tuple[Expr, tuple]]:
    """`e` as a list of (product without sums, the limits it is summed over), by linearity alone.

    `ValueError` where two factors are summed over the same letter: rename one of them.
    """
    if isinstance(e, Sum):
        return [(f, (*inner, *map(tuple, e.limits))) for f, inner in terms(e.function)]
    e = sp.expand(e)
    if isinstance(e, Add):
        return [term for part in e.args for term in terms(part)]
    if isinstance(e, Mul) and any(isinstance(f, Sum) for f in e.args):
        product = [(sp.S.One, ())]
        for factor in e.args:
            product = [_times(x, y) for x in product for y in terms(factor)]
        return product
    return [(e, ())]


def _times(x: tuple[Expr, tuple], y: tuple[Expr, tuple]) -> tuple[Expr, tuple]:
    for (_, bound), (other, more) in ((x, y), (y, x)):
        clash = {v for v, *_ in bound} & (other.free_symbols | {v for v, *_ in more})
        if clash:
            raise ValueError(
                f"index {clash.pop()} is summed over in one factor and used in another"
            )
    return x[0] * y[0], (*x[1], *y[1])


def flat(e: Expr) -> Expr:
    """`e` as one sum for each set of limits: linearity and the order of finite sums used up.

    A sum over an index that its terms do not contain becomes the number of terms. Sizes must not
    depend on an index, since such sums may not be exchanged: `ValueError`.
    """
    collected: dict[tuple, Expr] = {}
    for f, limits in terms(e):
        letters = {v for v, *_ in limits}
        if any(letters & bound.free_symbols for _, *bounds in limits for bound in bounds):
            raise ValueError(f"the limits {limits} depend on one another")
        kept = sorted((t for t in limits if t[0] in f.free_symbols), key=lambda t: t[0].name)
        for _, low, high in set(limits) - set(kept):
            f *= high - low + 1
        collected[tuple(kept)] = collected.get(tuple(kept), 0) + f
    return Add(*(Sum(x, *t) if t else x for t, f in collected.items() if (x := sp.expand(f)) != 0))


def equal(lhs: Expr, rhs: Expr) -> bool:
    """Whether the two are the same by linearity, exchange of finite sums and algebra."""
    return sp.simplify(flat(lhs - rhs)) == 0


def innermost(e: Expr, *inner: tuple) -> Expr:
    """`e` with the sums over `inner` moved inside all others, and every factor that does not depend
    on a sum's index moved out of it. Exchange of finite sums."""

    def one(f: Expr, limits: tuple) -> Expr:
        outer = [t for t in limits if t not in inner]
        if len(outer) + len(inner) != len(limits):
            raise ValueError(f"{f} is not summed over all of {inner}")
        inside, rest = _split(f, {v for v, *_ in inner})
        outside, constant = _split(rest, {v for v, *_ in outer})
        core = outside * Sum(inside, *inner)
        return constant * (Sum(core, *outer) if outer else core)

    return Add(*(one(f, limits) for f, limits in terms(e)))


def _split(f: Expr, letters: set) -> tuple[Expr, Expr]:
    depends = [x for x in Mul.make_args(f) if letters & x.free_symbols]
    return Mul(*depends), Mul(*(x for x in Mul.make_args(f) if x not in depends))


def instance(seed: int) -> dict:
    """One small mini-batch in exact fractions, for `evaluate`: a value for every size, a table for
    every letter, as functions of its indices. Sequences lie in random micro-batches, rows belong to
    random ranks, every mask keeps one row or more, all else is random.
    """
    draw = Random(seed)
    size = {x: draw.randint(1, 3) for x in (B, D, C, M, N, T, K, L)}
    batch = {k: (draw.randrange(size[D]), draw.randrange(size[M])) for k in range(size[B])}
    rows = [(k, r) for k in range(size[B]) for r in range(size[N])]
    owner = {row: draw.randrange(size[C]) for row in rows}
    first = {k: draw.randrange(size[N]) for k in range(size[B])}
    kept = {(k, r): int(r == first[k] or draw.random() < 0.6) for k, r in rows}
    return size | {
        a: lambda s, d, m: int(batch[s] == (d, m)),
        p: lambda c, s, i: int(owner[s, i] == c),
        w: lambda s, i: kept[s, i],
        n: lambda s: sum(kept[s, i] for i in range(size[N])),
        "seed": seed,
    }


def evaluate(e: Expr, at: dict) -> Fraction:
    """The exact value of `e` at an `instance`; a letter without a table has random fractions.

    `TypeError` for what is neither a sum, a product, a whole power, a symbol nor an `Indexed`.
    """
    match e:
        case Add():
            return sum((evaluate(x, at) for x in e.args), Fraction(0))
        case Mul():
            return prod((evaluate(x, at) for x in e.args), start=Fraction(1))
        case sp.Pow() if e.exp.is_Integer:
            return evaluate(e.base, at) ** int(e.exp)
        case sp.Rational():
            return Fraction(int(e.p), int(e.q))
        case Sum():
            *inner, (v, low, high) = e.limits
            term = Sum(e.function, *inner) if inner else e.function
            span = range(int(evaluate(low, at)), int(evaluate(high, at)) + 1)
            return sum((evaluate(term, at | {v: k}) for k in span), Fraction(0))
        case sp.Indexed():
            where = tuple(int(evaluate(k, at)) for k in e.indices)
            if e.base in at:
                return Fraction(at[e.base](*where))
            draw = Random(f"{e.base}{where}{at['seed']}")
            return Fraction(draw.randint(-9, 9), draw.randint(1, 9))
        case sp.Symbol() if e in at:
            return Fraction(at[e])
    raise TypeError(f"cannot evaluate {e}: allowed are sums, products, powers, symbols and tables")


class _Printer(LatexPrinter):
    """Sums over a whole range name their letters only; the page on notation gives the ranges."""

    def _print_Sum(self, e: Sum) -> str:
        if not {tuple(limit) for limit in e.limits} <= set(WHOLE):
            return super()._print_Sum(e)
        letters = ",".join(v.name for v, *_ in WHOLE if v in e.bound_symbols)
        body = self._print(e.function)
        return rf"\sum_{{{letters}}} " + (rf"\left({body}\right)" if e.function.is_Add else body)


def typeset(e: str | Expr) -> str:
    """LaTeX of `e`, a sum beside its factor and not in a numerator; a string is LaTeX already."""
    return e if isinstance(e, str) else _Printer({"long_frac_ratio": 1}).doprint(e)


def show(*parts: str | Expr) -> Math:
    """The parts as one displayed equality, for a notebook."""
    return Math(" = ".join(typeset(part) for part in parts))


def chain(first: str | Expr, *steps: tuple[str, str | Expr]) -> Math:
    """`first` and below it each (reason, expression), as one aligned chain of equalities."""
    rows = (rf"&= {typeset(e)} && \text{{{reason}}}" for reason, e in steps)
    return Math(rf"\begin{{aligned}}{typeset(first)} " + r" \\ ".join(rows) + r"\end{aligned}")
