"""Executed notebooks are alike on every machine, and nbval sees a changed output."""

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from cpnorm.execute import execute

SOURCE = """\
import sys
from IPython.display import SVG, display
print("one")
print("two")
print("aside", file=sys.stderr)
display(SVG('<svg xmlns="http://www.w3.org/2000/svg"/>'))
2 + 2"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    path = tmp_path_factory.mktemp("notebook") / "01_a.ipynb"
    cell = new_code_cell(SOURCE, metadata={"tags": ["sum"], "scrolled": True}, id="a")
    nbformat.write(new_notebook(cells=[cell], metadata={"widgets": {}}), path)
    execute(path)
    return path


def test_nothing_of_the_machine_is_kept(executed):
    notebook = nbformat.read(executed, as_version=4)
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert notebook.cells[0].metadata == {"tags": ["sum"]}
    assert notebook.cells[0].execution_count == 1
    text = [output.text for output in notebook.cells[0].outputs if output.get("name") == "stdout"]
    assert text == ["one\ntwo\n"]


def test_execution_is_repeatable(executed):
    before = executed.read_text()
    execute(executed)
    assert executed.read_text() == before


def test_error_leaves_the_file_alone(tmp_path):
    path = tmp_path / "01_a.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0", id="a")]), path)
    before = path.read_text()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute(path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("old", "new", "passes"),
    [
        ("aside", "elsewhere", True),
        ("xmlns", "class", True),
        ("two\\n", "three\\n", False),
    ],
)
def test_nbval_compares(executed, tmp_path, old, new, passes):
    before, outputs, after = executed.read_text().partition('"outputs"')
    stored, source, end = after.partition('"source"')
    assert old in stored
    (tmp_path / "01_a.ipynb").write_text(before + outputs + stored.replace(old, new) + source + end)
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", "."]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == (0 if passes else 1), run.stdout
