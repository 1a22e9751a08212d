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


def said(notebook):
    return [
        output["data"]["text/markdown"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    ]


def test_the_page_says_that_nothing_ran():
    """As long as no record is committed."""
    texts = said(nbformat.read(NOTEBOOK, as_version=4))
    recorded = (NOTEBOOK.parents[1] / "evidence" / gpu.FILE).is_file()
    assert len(texts) == 4
    assert ("no run on one is recorded" in texts[0]) is not recorded
    assert all((text == "Nothing ran.") is not recorded for text in texts[1:])


def test_the_page_shows_a_record_as_one(tmp_path, measured):
    """Run as a reader without a GPU runs it, with a record at hand."""
    for name in ("evidence", "notebooks"):
        (tmp_path / name).mkdir()
    (tmp_path / "evidence" / gpu.FILE).write_text(json.dumps(measured))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": tmp_path / "notebooks"}}
    NotebookClient(notebook, resources=folder).execute()
    texts = said(notebook)
    assert texts[0] == "No GPU is at hand. This is the record of a run on one."
    assert "Nothing ran." not in texts
    assert texts[3].count("CPAttention") == len(measured["engine"])
