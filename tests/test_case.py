"""A case says one step, round-trips to YAML, and refuses what makes no sense."""

import ast
import re
import subprocess
import sys
from functools import partial

import pytest
import yaml
from hypothesis import given, settings

from cpnorm import case as module
from cpnorm.case import Case, Sequence
from cpnorm.check import check
from cpnorm.engine import check_fit
from cpnorm.losses import actor_config
from cpnorm.transformer import Model
from strategies import cases

TWO = (Sequence(3, 5), Sequence(2, 9))


def test_counts_and_micro_batches():
    case = Case(
        sequences=(
            Sequence(3, 5),
            Sequence(2, 9),
            Sequence(20, 7),
            Sequence(4, 5, (1, 0, 0, 1, 1)),
        ),
        dp=2,
        cp=8,
    )
    assert (case.B, case.D, case.C, case.M) == (4, 2, 8, 2)
    assert case.n == (5, 9, 7, 3)
    assert case.micro_batches() == ((range(1), range(1, 2)), (range(2, 3), range(3, 4)))
    assert case.t == ((8, 11), (27, 9))
    assert (case.T, case.K) == (55, 8 * (1 + 1 + 3 + 1))


@given(cases())
@settings(max_examples=50)
def test_micro_batches_cover_the_sequences_in_order(case):
    flat = [s for replica in case.micro_batches() for part in replica for s in part]
    assert flat == list(range(case.B))
    assert sum(map(sum, case.t)) == case.T
    assert case.T - (case.C - 1) * case.D * case.M <= case.K <= case.T


@given(cases())
@settings(max_examples=50)
def test_yaml_round_trip(case):
    assert Case.from_yaml(case.to_yaml()) == case


def test_a_list_of_sequences_is_kept_as_a_tuple():
    assert Case(sequences=list(TWO)) == Case(sequences=TWO)
    assert hash(Case(sequences=[Sequence(1, 2, [1, 0])])) is not None


REFUSED = [
    ({"cp": 0}, "cp is 0, allowed is an integer, 1 or more"),
    ({"cp": True}, "cp is True, allowed is an integer, 1 or more"),
    ({"cp": 2.0}, "cp is 2.0, allowed is an integer, 1 or more"),
    ({"tp": -1}, "tp is -1, allowed is an integer, 1 or more"),
    ({"pp": "1"}, "pp is '1', allowed is an integer, 1 or more"),
    ({"dp": 3}, "dp is 3, allowed is a divisor of the 2 sequences"),
    ({"dp": 0}, "dp is 0, allowed is an integer, 1 or more"),
    (
        {"dp": 2, "micro_batch_size": 2},
        "micro_batch_size is 2, allowed is a divisor of the 1 sequences of a replica",
    ),
    ({"seed": -1}, "seed is -1, allowed is an integer, 0 or more"),
    ({"seed": False}, "seed is False, allowed is an integer, 0 or more"),
    (
        {"loss_scale_factor": 0},
        "loss_scale_factor is 0, allowed is None or an integer, 1 or more",
    ),
    ({"clip": 1}, "clip is 1, allowed is true or false"),
    ({"rollout_weights": None}, "rollout_weights is None, allowed is true or false"),
    ({"clip_low": -0.1}, "clip_low is -0.1, allowed is a finite number, 0 or more"),
    ({"clip_high": float("nan")}, "clip_high is nan, allowed is a finite number, 0 or more"),
    ({"clip_high": True}, "clip_high is True, allowed is a finite number, 0 or more"),
    ({"loss": 3}, "loss is 3, allowed is a name"),
    ({"mode": ""}, "mode is '', allowed is a name"),
    ({"regime": "both"}, "regime is 'both', allowed is one of per-token, averaging"),
    ({"layout": ["zigzag"]}, "layout is ['zigzag'], allowed is one of zigzag, contiguous"),
    ({"dtype": "float16"}, "dtype is 'float16', allowed is one of float64, float32, bfloat16"),
    ({"sequences": ()}, "sequences is (), allowed is a list of at least one Sequence"),
    ({"sequences": 3}, "sequences is 3, allowed is a list of Sequence"),
    ({"sequences": ((3, 5),)}, "sequences is ((3, 5),), allowed is a list of Sequence"),
    (
        {"sequences": (Sequence(1, 2, (0, 0)),)},
        "sequences have (0,) counted response tokens, allowed is at least one in all",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refusal_names_field_value_and_what_is_allowed(fields, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011, the message is compared below
        Case(**{"sequences": TWO} | fields)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 5), "prompt is 0, allowed is an integer, 1 or more"),
        ((1, 0), "response is 0, allowed is an integer, 1 or more"),
        ((1, True), "response is True, allowed is an integer, 1 or more"),
        ((1, 2, (1,)), r"mask is \(1,\), allowed is a list of 2 entries, one a response token"),
        ((1, 2, (1, 2)), r"mask is \(1, 2\), allowed is a list of the integers 0 and 1"),
        ((1, 2, (1, True)), r"mask is \(1, True\), allowed is a list of the integers 0 and 1"),
        ((1, 2, "11"), "mask is '11', allowed is a list of 0 and 1, one for each response token"),
    ],
)
def test_sequence_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        Sequence(*fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu": 1}, "case has the unknown key 'cpu', allowed are sequences, dp, cp"),
        ({"sequences": None}, "sequences is None, allowed is a list of mappings"),
        ({"sequences": [5]}, "sequences is 5, allowed is a mapping"),
        ({"sequences": [{"prompt": 1}]}, "sequences has no key 'response', which is needed"),
        (
            {"sequences": [{"prompt": 1, "response": 2, "n": 3}]},
            "sequences has the unknown key 'n', allowed are prompt, response, mask",
        ),
    ],
)
def test_yaml_refusals(change, message):
    values = yaml.safe_load(Case(sequences=TWO).to_yaml()) | change
    with pytest.raises(ValueError, match=message):
        Case.from_yaml(yaml.safe_dump(values))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", r"case is \[1, 2\], allowed is a mapping"),
        ("dp: [", "case is not YAML: "),
        ("dp: 1", "case has no key 'sequences', which is needed"),
        ("!!python/object/apply:os.getcwd []", "case is not YAML: "),
    ],
)
def test_text_that_is_no_case(text, message):
    with pytest.raises(ValueError, match=message):
        Case.from_yaml(text)


def test_a_case_needs_neither_verl_nor_torch():
    program = (
        "import sys; from cpnorm import case; from cpnorm.case import Case, Sequence; "
        "case.parsed = None; "  # its sources are not read either
        "Case(sequences=(Sequence(1, 1),)); "
        "assert not {'verl', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": "ppo"}, "loss is 'ppo', allowed is one of vanilla, "),
        ({"mode": "mean"}, "mode is 'mean', allowed is one of token-mean, "),
    ],
)
def test_a_name_that_verl_lacks_makes_a_case_that_does_not_run(fields, message):
    """The engine, the check of the losses, and each loss alone refuse it before anything runs."""
    case = Case(sequences=TWO, **fields)
    for run in (module.check_runs, check, actor_config, partial(check_fit, model=Model())):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            run(case)
        assert "\n" not in str(error.value)


def test_names_that_the_installed_verl_has_lost(monkeypatch):
    monkeypatch.setattr(module, "parsed", lambda name: ast.parse("x = 1"))
    module.losses.cache_clear()
    module.modes.cache_clear()
    try:
        with pytest.raises(ValueError, match="registers no policy loss"):
            module.losses()
        with pytest.raises(ValueError, match="has no list valid_loss_agg_modes"):
            module.modes()
    finally:
        module.losses.cache_clear()
        module.modes.cache_clear()
