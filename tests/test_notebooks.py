"""What nbval does not see: cells never run, stored errors, outputs that name a machine."""

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LINES = 20
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


def test_unlisted_notebook_is_noticed(book):
    root = book(title())
    (root / "_toc.yml").write_text("root: index\n")
    assert problems(root) == ["01_a.ipynb: not in _toc.yml"]
