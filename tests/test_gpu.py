"""The GPU's record: without a GPU nothing is written, and nothing looks as if it had run."""

import json
import os
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from cpnorm import gpu

NOTEBOOK = Path(__file__).parents[1] / "notebooks/12_gpu.ipynb"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "CP_SIZES", (1, 2))
        return gpu.measure("cpu")


def test_every_loss_and_the_engine_over_cp_sizes_and_dtypes(measured):
    assert len(measured["losses"]) == 2 * 2 * 3
    assert len(measured["engine"]) == 2 * 3
    for row in measured["losses"]:
        if row["dtype"] == "float64":
            assert row["error"] <= 1e-13
    for row in measured["engine"]:
        if row["dtype"] == "float64":
            assert row["residual"] <= 1e-13
            assert abs(row["ratio"] / row["predicted"] - 1) <= 1e-13
    assert measured["device"] == {"name": "cpu"}
    json.dumps(measured)


def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    gpu.main(str(tmp_path))
    assert capsys.readouterr().out == "no GPU here: gpu.json is not written\n"
    assert os.listdir(tmp_path) == []
    assert gpu.record(tmp_path) is None


def test_a_record_is_read_back(tmp_path, measured):
    (tmp_path / gpu.FILE).write_text(json.dumps(measured))
    assert gpu.record(tmp_path) == measured


@pytest.mark.parametrize("recorded", [False, True])
def test_the_page_says_whether_anything_ran(tmp_path, measured, recorded):
    """Run as a reader without a GPU runs it, with a record at hand and without."""
    folder = tmp_path / "evidence"
    folder.mkdir()
    if recorded:
        (folder / gpu.FILE).write_text(json.dumps(measured))
    (tmp_path / "notebooks").mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, resources={"metadata": {"path": tmp_path / "notebooks"}})
    client.execute()
    said = [
        output["data"]["text/markdown"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    ]
    assert len(said) == 4
    assert ("no run on one is recorded" in said[0]) is not recorded
    assert all((text == "Nothing ran.") is not recorded for text in said[1:])
