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

```{prf:proof}
Why.
```

:::{evidence} sum
:::

```{prf:observation} What a run shows
:label: run

Text about {prf:ref}`the sum <sum>`.
```

:::{evidence} run
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
RUN = {
    "title": "A run",
    "chapter": "book/01_sum.md",
    "status": "measured",
    "uses": ["sum"],
    "checks": ["notebooks/01_sum.ipynb#sum-check"],
}


def write(root, **entries):
    """`root` with the register's entries of these names in place of its own; None drops one."""
    register = {"sum": ENTRY, "run": RUN} | entries
    kept = {label: entry for label, entry in register.items() if entry is not None}
    (root / claims.FILE).write_text(yaml.safe_dump(kept))


def noticed(root, problem):
    found = claims.problems(root)
    return any(problem in sentence for sentence in found), found


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
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    write(tmp_path)
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
        ({"status": "measured"}, "status is 'measured', but it is stated as theorem"),
        ({"status": "measured"}, "is measured but names a derivation"),
        ({"uses": ["smu"]}, "sum: uses smu, which is not in claims.yml"),
        ({"uses": ["run"]}, "sum: is proved but uses run, which is measured"),
        ({"uses": ["run"]}, "sum: uses run, to which its text does not refer"),
        ({"uses": ["run"]}, "rests on itself, by "),
        ({"uses": ["sum"]}, "rests on itself, by sum"),
    ],
)
def test_wrong_entry_is_noticed(book, change, problem):
    write(book, sum=ENTRY | change)
    found, sentences = noticed(book, problem)
    assert found, sentences


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"status": "proved"}, "status is 'proved', but it is stated as observation"),
        ({"status": "open", "reason": "x"}, "status is 'open', but it is stated as observation"),
        ({"derivation": ["notebooks/01_sum.ipynb#sum-chain"]}, "measured but names a derivation"),
        ({"checks": []}, "is measured but names neither checks nor tests"),
        ({"uses": []}, "run: its text refers to sum, which is not among its uses"),
        ({"uses": ["sum", "sum"]}, "run: uses sum twice"),
    ],
)
def test_wrong_measured_entry_is_noticed(book, change, problem):
    write(book, run=RUN | change)
    found, sentences = noticed(book, problem)
    assert found, sentences


@pytest.mark.parametrize(
    ("register", "problem"),
    [
        ({"sum": None}, "sum: stated in book/01_sum.md, but not in claims.yml"),
        ({"more": ENTRY}, "more: in claims.yml, but not stated in the book"),
    ],
)
def test_statements_and_entries_match(book, register, problem):
    write(book, **register)
    assert problem in claims.problems(book)


STEPS = """
```{prf:lemma} Two steps on
:label: two

By {eq}`eq-one`.
```

```{prf:proof}
Nothing more.
```

```{prf:lemma} One step on
:label: one

$$
x
$$ (eq-one)
```

```{prf:proof}
By {prf:ref}`guess`.
```

```{prf:conjecture} A guess
:label: guess
```
"""


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ("open", "one: is proved but uses guess, which is open"),
        ("measured", "one: is proved but uses guess, which is measured"),
    ],
)
def test_a_proof_that_rests_on_less_is_noticed_from_afar(book, status, problem):
    """Through an equation, a lemma and a proof."""
    page = book / "book/01_sum.md"
    page.write_text(page.read_text() + STEPS)
    weak = {"status": status} | ({"reason": "not run"} if status == "open" else {})
    write(book, two=ENTRY | {"uses": ["one"]}, one=ENTRY | {"uses": ["guess"]}, guess=RUN | weak)
    found, sentences = noticed(book, problem)
    assert found, sentences
    assert not any("not among its uses" in sentence for sentence in sentences)
    write(book, two=ENTRY, one=ENTRY | {"uses": ["guess"]}, guess=RUN | weak)
    assert "two: its text refers to one, which is not among its uses" in claims.problems(book)


def test_every_status_has_a_statement_in_the_book():
    assert {entry["status"] for entry in claims.load(ROOT).values()} == set(claims.STATUSES)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (":label: sum\n", "", "1 numbered statements have no :label:"),
        (":::{evidence} sum\n:::\n", "", "sum: 0 evidence boxes in the book, not one"),
        ("{evidence} sum", "{evidence} smu", "smu: an evidence box for it, but no entry"),
        ("# A chapter", "```{prf:lemma}\n:label: sum\n```", "sum: 2 statements carry this label"),
        ("{prf:theorem}", "{prf:conjecture}", "it is stated as conjecture"),
        ("{prf:theorem}", "{prf:observation}", "it is stated as observation"),
        ("{prf:proof}", "{note}", "sum: a proof stands under what is proved"),
        (":::{evidence} run", "```{prf:proof}\nBy it.\n```\n:::{evidence} run", "run: a proof"),
    ],
)
def test_wrong_page_is_noticed(book, old, new, problem):
    page = book / "book/01_sum.md"
    page.write_text(page.read_text().replace(old, new))
    found, sentences = noticed(book, problem)
    assert found, sentences


def test_tag_carried_twice_is_noticed(book):
    (book / "notebooks/01_sum.ipynb").write_text(notebook("sum-chain", "sum-chain"))
    found, sentences = noticed(book, "2 code cells")
    assert found, sentences


def test_tag_claimed_in_two_notebooks_is_noticed(book):
    (book / "notebooks/02_sum.ipynb").write_text(notebook("sum-chain"))
    write(book, sum=ENTRY | {"checks": ["notebooks/02_sum.ipynb#sum-chain"]})
    found, sentences = noticed(book, "claimed in several notebooks")
    assert found, sentences
