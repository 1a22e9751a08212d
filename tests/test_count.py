"""The token count: its formulas, its repair, what verl reports, and the text offered upstream."""

import ast
import inspect
import re
import textwrap
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpnorm import engine, oracle
from cpnorm.case import Case, Sequence, divisor
from cpnorm.count import expected, ratio, reported, worst
from cpnorm.figures import count as figure
from cpnorm.layout import owners
from cpnorm.ranks import World
from cpnorm.transformer import Model

REPORT = Path(__file__).parents[1] / "book/14_report.md"
SMALLEST = Case(sequences=(Sequence(1, 2),), cp=2)
EXACT = 1e-13  # as in test_engine.py

tokens = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), min_size=1, max_size=3)
ranks = st.integers(1, 128)
lengths = st.lists(st.integers(1, 80), min_size=1, max_size=5)


@given(t=tokens, C=ranks)
def test_ratio_is_one_plus_the_remainders(t, C):
    R, T = (sum(map(sum, x)) for x in ([[n % C for n in part] for part in t], t))
    assert 0 <= R <= (C - 1) * sum(map(len, t))
    assert divisor(t, C) == T - R
    assert ratio(t, C) == (1 + Fraction(R, T - R) if T > R else T)


@given(t=tokens, C=ranks)
def test_no_batch_is_worse_than_the_worst(t, C):
    """Every micro-batch in the block of the first: below `worst`, at it with C - 1 lost each."""
    low = C * (t[0][0] // C or 1)
    inside = [[low + n % C for n in part] for part in t]
    assert ratio(inside, C) - 1 <= worst(low, C)
    assert ratio([[low + C - 1 for _ in part] for part in t], C) - 1 == worst(low, C)


@given(low=st.integers(1, 300), C=ranks)
def test_expected_is_the_mean_over_a_block(low, C):
    block = range(C * low, C * low + C)
    assert sum(ratio([[n]], C) - 1 for n in block) / C == expected(block[-1], C)


@given(t=st.integers(0, 10**6), C=ranks)
def test_reported_counts_add_up(t, C):
    counts = reported(t, C)
    assert sum(counts) == t
    assert counts == tuple(t // C + (c < t % C) for c in range(C))


@pytest.mark.parametrize(("tokens", "C"), [(3, 4), (3, 0)])
def test_worst_refuses_what_has_no_bound(tokens, C):
    with pytest.raises(ValueError, match=f"C is {C} and tokens is 3"):
        worst(tokens, C)


def test_picture_shows_the_formulas():
    picture = figure.bias()
    lines = [x for x in picture.axes[0].lines if x.get_linestyle() == "-" and len(x.get_xdata())]
    assert len(lines) == len(figure.SIZES)
    for C, line in zip(figure.SIZES, lines, strict=True):
        assert list(line.get_ydata()) == [float(worst(int(t), C)) for t in line.get_xdata()]


def test_smallest_failing_case_and_its_repairs():
    J, reference = oracle.gradient(SMALLEST, Model())
    with World(2) as two:
        for variant, K, factor in (("verl", 2, 1.5), ("remainder", 3, 1), ("full count", 6, 1)):
            step = engine.run(two, SMALLEST, exact=True, variant=variant)
            found = engine.compare(step, reference, float(J))
            assert (step.K, step.T) == (K, 3)
            assert abs(found.ratio / factor - 1) <= EXACT
            assert found.residual <= EXACT
            assert found.loss <= EXACT


@given(lengths=lengths, C=st.integers(1, 16), tp=st.integers(1, 4))
def test_dynamic_cp_counts_each_ranks_own_rows(lengths, C, tp):
    counts = [local_count(lengths, C, c, tp) for c in range(C)]
    assert counts == owners(tuple(lengths), C, tp).sum(1).tolist()
    assert sum(counts) == sum(lengths)


@given(lengths=lengths, C=st.integers(1, 16), tp=st.integers(1, 4), rows=st.integers(1, 60))
def test_dynamic_cp_counts_exactly_in_the_contiguous_layout(lengths, C, tp, rows):
    for least in (None, rows):
        counts = [local_count(lengths, C, c, tp, "contiguous", least) for c in range(C)]
        assert sum(counts) == sum(lengths)


def local_count(lengths, C, c, tp, layout="zigzag", least=None):
    """Rows that verl 0.9.1 counts as real on rank c of a dynamic CP group."""
    from verl.utils.dynamic_cp_scheduler import _local_padding_mask

    sizes = {"cp_size": C, "cp_rank": c, "tp_size": tp}
    return int(
        (~_local_padding_mask(lengths, **sizes, cp_layout=layout, min_local_rows=least)).sum()
    )


@given(data=st.data(), log_ranks=st.integers(0, 3), tp=st.integers(1, 2))
def test_dynamic_cp_hands_every_token_to_one_count(data, log_ranks, tp):
    """verl's own `schedule`, with drawn groups where Megatron-Core would choose them."""
    from verl.utils import dynamic_cp_scheduler as verl
    from verl.utils import tensordict_utils as tu

    size = 2**log_ranks
    plan, lengths = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        group = 2 ** data.draw(st.integers(0, log_ranks))
        assigned = []
        for _ in range(size // group):
            new = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
            assigned += [[len(lengths) + k for k in range(len(new))]] * group
            lengths += new
        plan.append(assigned)
    nested = [torch.zeros(n, dtype=torch.int64) for n in lengths]
    batch = {"input_ids": torch.nested.as_nested_tensor(nested, layout=torch.jagged)}
    batch = tu.get_tensordict(batch)
    fixed = SimpleNamespace(get_groups_and_subsamples=lambda samples: plan)
    total = 0
    with mock.patch.object(verl, "get_megatron_dynamic_cp_scheduler_cls") as found:
        found.return_value = lambda **sizes: fixed
        for rank in range(size):
            scheduler = verl.DynamicCPScheduler(max(lengths), dp_size=1, cp_size=size)
            group = SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
            for micro in scheduler.schedule(batch, group, tp_size=tp):
                total += tu.get_non_tensor_data(micro, verl.DCP_LOCAL_NUM_TOKENS, None)
    assert total == sum(lengths)


def test_no_megatron_core_has_the_dynamic_scheduler():
    """Once this fails, the engine can run dynamic CP, and the conjecture about it can go."""
    from verl.utils.dynamic_cp_scheduler import get_megatron_dynamic_cp_scheduler_cls

    with pytest.raises(RuntimeError, match="requires a Megatron-Core build"):
        get_megatron_dynamic_cp_scheduler_cls()


def blocks(page=REPORT):
    """The Python of a page; of the report: the changed line and the test."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def run_offered_test(monkeypatch):
    """The report's test, on all its parameters."""
    names = {}
    exec(compile(blocks()[1], "report", "exec"), names)
    marks = {m.args[0]: m.args[1] for m in names["test_reported_tokens_add_up"].pytestmark}
    for cp_size in marks["cp_size"]:
        for tokens in marks["lengths"]:
            names["test_reported_tokens_add_up"](monkeypatch, cp_size, tokens)


def test_the_offered_test_fails_on_verl_as_it_is(monkeypatch):
    with pytest.raises(AssertionError):
        run_offered_test(monkeypatch)


@pytest.mark.parametrize("page", [REPORT, REPORT.with_name("index.md")], ids=lambda p: p.stem)
def test_the_offered_test_passes_with_the_offered_line(monkeypatch, page):
    """What the page offers takes the place of the assignment in verl's own source."""
    from verl.workers.engine.megatron import transformer_impl

    owner = transformer_impl.MegatronEngineWithLMHead
    source = ast.parse(textwrap.dedent(inspect.getsource(owner.postprocess_micro_batch_func)))
    floors = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "local_num_tokens"
        and "//" in ast.unparse(node)
    ]
    assert len(floors) == 1
    repair = ast.NodeTransformer()
    repair.visit_Assign = lambda node: ast.parse(blocks(page)[0]).body if node in floors else node
    source, names = repair.visit(source), {}
    exec(compile(source, "patched", "exec"), vars(transformer_impl), names)
    monkeypatch.setattr(owner, "postprocess_micro_batch_func", *names.values())
    run_offered_test(monkeypatch)
