"""What nbval does not see: cells never run, stored errors, outputs that name a machine."""

import json
import re
from pathlib import Path

import pytest
import yaml

from cpnorm.stored import DIGITS

ROOT = Path(__file__).parents[1]
LINES = 20
# A number with a point or an exponent, and no part of a version.
FLOAT = re.compile(r"(?<![\w.])(?=\d+(?:\.\d|e[+-]?\d))(\d+)\.?(\d*)(?:e[+-]?\d+)?(?!\.?\d)", re.I)
NOISE = 1e-12  # what is smaller is round-off, unless it is a bound: a power of ten, or behind "≤"
MACHINE = re.compile(
    r"(?<!\w)/(home|Users|root|tmp|work|opt|usr)/|\.venv|[A-Z]:\\\\| at 0x[0-9a-f]{6}"
)


def toc_files(root):
    """Every `file` and the `root` of `_toc.yml`, in order."""

    def walk(node):
        if isinstance(node, dict):
            yield from (node[key] for key in ("root", "file") if key in node)
            node = list(node.values())
        if isinstance(node, list):
            for child in node:
                yield from walk(child)

    return list(walk(yaml.safe_load((root / "_toc.yml").read_text())))


def stored_text(output):
    """The readable part of an output: streams, and every text representation."""
    data = [value for kind, value in output.get("data", {}).items() if "image/" not in kind]
    return "".join("".join(part) for part in [output.get("text", ""), *data])


def float_problems(text):
    """Yield the floats of an output with digits that hang on the machine."""
    for found in FLOAT.finditer(text):
        whole, rest = found.groups()
        digits = (whole + (rest if rest != "0" else "")).lstrip("0")
        if len(digits) > DIGITS:
            yield f"{found[0]} has more than {DIGITS} significant digits"
        bound = digits.rstrip("0") == "1" or text[: found.start()].endswith("≤ ")
        if 0 < float(found[0]) < NOISE and not bound:
            yield f"{found[0]} is round-off: assert that it is within a bound, and store the bound"


def cell_problems(cell, count):
    """Yield what is wrong with a code cell that must be the `count`-th to run."""
    source = "".join(cell["source"])
    if cell["execution_count"] != count:
        yield f"execution count {cell['execution_count']}, expected {count}"
    if len(source.splitlines()) > LINES:
        yield f"{len(source.splitlines())} lines, at most {LINES}"
    for output in cell["outputs"]:
        if output["output_type"] == "error":
            yield f"stored error {output['ename']}"
        if output.get("name") == "stderr":
            yield "stored stderr, which no run is compared with"
        if "image/svg+xml" in (data := output.get("data", {})) and len(data) == 1:
            yield "SVG alone, which no run is compared with"
        if found := MACHINE.search(stored_text(output)):
            yield f"an output that differs between machines: {found[0]}"
        yield from float_problems(stored_text(output))


def problems(root):
    """Everything wrong with the notebooks of the book in `root`, one sentence each."""
    found = []
    listed = toc_files(root)
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        if f"notebooks/{path.stem}" not in listed:
            found.append(f"{path.name}: not in _toc.yml")
        cells = json.loads(path.read_text())["cells"]
        if not cells or not re.match("# .", "".join(cells[0]["source"])):
            found.append(f"{path.name}: the first cell is no title")
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        for count, cell in enumerate(code, start=1):
            found += [f"{path.name}, code cell {count}: {p}" for p in cell_problems(cell, count)]
        for number, cell in enumerate(cells):
            if any(tag != tag.lower() for tag in cell["metadata"].get("tags", [])):
                found.append(f"{path.name}, cell {number}: a tag that is not in lower case")
    return found


def test_notebooks_have_no_problem():
    assert problems(ROOT) == []


def title():
    return {"cell_type": "markdown", "metadata": {}, "source": "# Title"}


def code(source="1", count=1, tags=(), **output):
    outputs = [output] if output else []
    cell = {"cell_type": "code", "metadata": {"tags": list(tags)}, "source": source}
    return cell | {"execution_count": count, "outputs": outputs}


@pytest.fixture
def book(tmp_path):
    """Write a book whose one notebook has the given cells."""

    def write(*cells):
        (tmp_path / "notebooks").mkdir()
        (tmp_path / "notebooks/01_a.ipynb").write_text(json.dumps({"cells": cells}))
        parts = [{"caption": "A", "chapters": [{"file": "notebooks/01_a"}]}]
        (tmp_path / "_toc.yml").write_text(yaml.safe_dump({"root": "index", "parts": parts}))
        return tmp_path

    return write


def test_good_notebook_has_no_problem(book):
    good = code(output_type="execute_result", data={"text/plain": "x/home", "image/png": "/tmp/"})
    assert problems(book(title(), good, code("a\n" * LINES, count=2))) == []


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ([code()], "the first cell is no title"),
        ([], "the first cell is no title"),
        ([title(), code(count=None)], "execution count None, expected 1"),
        ([title(), code(), code(count=3)], "execution count 3, expected 2"),
        ([title(), code("a\n" * (LINES + 1))], f"{LINES + 1} lines, at most {LINES}"),
        ([title(), code(output_type="error", ename="ValueError")], "stored error ValueError"),
        ([title(), code(output_type="stream", name="stderr", text="x")], "stored stderr"),
        ([title(), code(output_type="display_data", data={"image/svg+xml": "x"})], "SVG alone"),
        (
            [title(), code(output_type="stream", name="stdout", text=["a\n", "in /home/x"])],
            "/home/",
        ),
        (
            [title(), code(output_type="execute_result", data={"text/plain": "<A at 0x7f12ab>"})],
            "0x",
        ),
        ([title(), code(tags=["Sum"])], "not in lower case"),
    ],
)
def test_problem_is_noticed(book, cells, problem):
    found = problems(book(*cells))
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "123456789/1000 1234567 22,688 -1/3 $x_{1234567}$",
        "0.123456 123.456 -1.23456 0.00012345 1.23456e-05 123456.0",
        "2.13.0+cpu 1.0.4.post1234567 v2026.1234567 0.16.1 2026.10.19",
        "≤ 2e-13 1e-13 1e-15 0.00000000000001 0.0 0.00e+00",
        "The 1234567. And 1.5.",
    ],
)
def test_short_or_exact_number_is_no_problem(text):
    assert list(float_problems(text)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1.2760002292704848", "1.2760002292704848 has more"),
        ("np.float64(0.2499999999999998)", "0.2499999999999998 has more"),
        ("off by 36.61234 %", "36.61234 has more"),
        ("1.000000", "1.000000 has more"),
        ("1234567.0", "1234567.0 has more"),
        ("-4.656612873077393e-10", "4.656612873077393e-10 has more"),
        ("[1.5, 1.2345678]", "1.2345678 has more"),
        ("1.2345678MB", "1.2345678 has more"),
        ("x=1.2345678.", "1.2345678 has more"),
        ("error 3e-17", "3e-17 is round-off"),
        ("2.3E-16", "2.3E-16 is round-off"),
        ("0.000000000000023", "0.000000000000023 is round-off"),
    ],
)
def test_digits_of_the_machine_are_noticed(book, text, problem):
    printed = code(output_type="stream", name="stdout", text=[text, "\n"])
    glued = code(
        output_type="display_data", data={"application/papermill.record/text/plain": text}, count=2
    )
    first, second = problems(book(title(), printed, glued))
    assert problem in first
    assert problem in second


def test_unlisted_notebook_is_noticed(book):
    root = book(title())
    (root / "_toc.yml").write_text("root: index\n")
    assert problems(root) == ["01_a.ipynb: not in _toc.yml"]
