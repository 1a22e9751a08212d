"""claims.yml agrees with the book, and each way of disagreeing is noticed."""

import json
from pathlib import Path

import pytest
import yaml

from cpnorm import claims

ROOT = Path(__file__).parents[1]


def test_register_agrees_with_the_book():
    assert claims.problems(ROOT) == []


PAGE = """\
# A chapter

```{prf:theorem} A title
:label: sum

Text.
```

:::{evidence} sum
:::

````markdown
```{prf:lemma} Shown as source, not a statement
:label: shown
```
````
"""
ENTRY = {
    "title": "A sum",
    "chapter": "book/01_sum.md",
    "status": "proved",
    "derivation": ["notebooks/01_sum.ipynb#sum-chain"],
    "tests": ["tests/test_sum.py::test_sum", "tests/test_sum.py::TestSum::test_more"],
    "mutants": ["flip", "drop"],
}


def notebook(*tags):
    cells = [{"cell_type": "code", "metadata": {"tags": [tag]}, "source": ""} for tag in tags]
    return json.dumps({"cells": cells})


@pytest.fixture
def book(tmp_path):
    """A small book without a problem."""
    files = {
        "book/01_sum.md": PAGE,
        "notebooks/01_sum.ipynb": notebook("sum-chain", "sum-check"),
        "tests/test_sum.py": "def test_sum(): ...\nclass TestSum:\n    def test_more(self): ...\n",
        "src/cpnorm/mutants.py": "MUTANTS = {'flip': 1, 'drop': 2}\n",
        claims.FILE: yaml.safe_dump({"sum": ENTRY}),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_small_book_has_no_problem(book):
    assert claims.problems(book) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"status": "open", "reason": "not run"}, "status is 'open', but it is stated as theorem"),
        ({"status": "done"}, "status is 'done'"),
        ({"status": "open"}, "needs a reason exactly when it is open"),
        ({"reason": "none needed"}, "needs a reason exactly when it is open"),
        ({"chapter": "book/02_other.md"}, "it stands in book/01_sum.md"),
        ({"derivation": []}, "names no derivation"),
        ({"tests": []}, "names neither checks nor tests"),
        ({"derivation": ["notebooks/01_sum.ipynb#sum-chian"]}, "0 code cells"),
        ({"checks": ["notebooks/01_sum.ipynb#Sum-Chain"]}, "tag-in-lower-case"),
        ({"checks": ["notebooks/01_gone.ipynb#sum-chain"]}, "01_gone.ipynb does not exist"),
        ({"tests": ["tests/test_sum.py::test_gone"]}, "has no function test_gone"),
        ({"tests": ["tests/test_gone.py::test_sum"]}, "test_gone.py does not exist"),
        ({"mutants": ["flop"]}, "has no mutant flop"),
        ({"titel": "typo"}, "has unknown fields: titel"),
    ],
)
def test_wrong_entry_is_noticed(book, change, problem):
    (book / claims.FILE).write_text(yaml.safe_dump({"sum": ENTRY | change}))
    found = claims.problems(book)
    assert any(problem in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("register", "problem"),
    [
        ({}, "sum: stated in book/01_sum.md, but not in claims.yml"),
        ({"sum": ENTRY, "more": ENTRY}, "more: in claims.yml, but not stated in the book"),
    ],
)
def test_statements_and_entries_match(book, register, problem):
    (book / claims.FILE).write_text(yaml.safe_dump(register))
    assert problem in claims.problems(book)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (":label: sum\n", "", "1 numbered statements have no :label:"),
        (":::{evidence} sum\n:::\n", "", "sum: 0 evidence boxes in the book, not one"),
        ("{evidence} sum", "{evidence} smu", "smu: an evidence box for it, but no entry"),
        ("# A chapter", "```{prf:lemma}\n:label: sum\n```", "sum: 2 statements carry this label"),
        ("{prf:theorem}", "{prf:conjecture}", "it is stated as conjecture"),
    ],
)
def test_wrong_page_is_noticed(book, old, new, problem):
    page = book / "book/01_sum.md"
    page.write_text(page.read_text().replace(old, new))
    found = claims.problems(book)
    assert any(problem in sentence for sentence in found), found


def test_tag_carried_twice_is_noticed(book):
    (book / "notebooks/01_sum.ipynb").write_text(notebook("sum-chain", "sum-chain"))
    assert "2 code cells" in claims.problems(book)[0]


def test_tag_claimed_in_two_notebooks_is_noticed(book):
    (book / "notebooks/02_sum.ipynb").write_text(notebook("sum-chain"))
    entry = ENTRY | {"checks": ["notebooks/02_sum.ipynb#sum-chain"]}
    (book / claims.FILE).write_text(yaml.safe_dump({"sum": entry}))
    assert "claimed in several notebooks" in claims.problems(book)[0]
