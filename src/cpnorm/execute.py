"""Re-execute notebooks in place and keep nothing that differs from machine to machine.

`python -m cpnorm.execute PATH...`; a cell that raises stops with its traceback, the file unchanged.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def strip(notebook):
    """Drop what varies between runs: timestamps and the interpreter's version."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    return notebook


def merge_streams(cell):
    """Join pieces of one stream that follow each other: where they are cut is chance."""
    merged = []
    for output in cell.get("outputs", []):
        last = merged[-1] if merged else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    if cell.cell_type == "code":
        cell.outputs = merged


def execute(path):
    """Run the notebook at `path` from its own folder and write it back."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.extra_arguments = ["--log-level=ERROR"]
    client.execute()
    for cell in notebook.cells:
        merge_streams(cell)
    nbformat.write(strip(notebook), path)


if __name__ == "__main__":
    for name in tqdm(sys.argv[1:], desc="notebooks", unit="nb"):
        execute(Path(name))
