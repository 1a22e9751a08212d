"""The names on the notation page exist in the installed verl and Megatron-Core."""

import re
from pathlib import Path

import pytest

from cpnorm.sources import folder

PAGE = Path(__file__).parents[1] / "book/01_notation.md"


def names(text):
    """`(name, file)` for each "`name` in `file.py`" in a page."""
    return re.findall(r"`(\w+)` in `([\w/]+\.py)`", text)


def missing(text):
    """Those of `names` whose file is not installed or does not contain the name as a word."""
    for name, file in names(text):
        source = folder(file.split("/")[0]).parent / file
        if not (source.is_file() and re.search(rf"\b{name}\b", source.read_text())):
            yield name, file


def test_every_name_exists_upstream():
    text = PAGE.read_text()
    rows = [row for row in text.splitlines() if row.startswith("| $")]
    assert len(rows) >= 20
    assert not list(missing(text))


@pytest.mark.parametrize(
    "text",
    [
        "`no_such_name` in `verl/trainer/ppo/core_algos.py`",
        "`agg_loss` in `verl/trainer/ppo/no_such_file.py`",
    ],
)
def test_a_missing_name_is_found(text):
    assert len(list(missing(text))) == 1
