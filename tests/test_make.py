"""A wrong Python gives one sentence, and `make serve` copes with a port in use."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cpnorm import serve

ROOT = Path(__file__).parents[1]
NEEDED = ("Makefile", "requirements.txt", "requirements-releases.txt", "pyproject.toml")


def setup_with(folder, python):
    """What `make setup PYTHON=python` says in `folder`, without make's own last line."""
    for name in NEEDED:
        shutil.copy(ROOT / name, folder)
    run = subprocess.run(
        ["make", "setup", f"PYTHON={python}"], cwd=folder, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert not (folder / ".venv").exists()
    return [line for line in run.stderr.splitlines() if not line.startswith("make")]


def fake_python(folder, *lines):
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return path


def test_wrong_python_version(tmp_path):
    python = fake_python(tmp_path, "echo 3.13")
    assert setup_with(tmp_path, python) == [
        f"PYTHON={python} is Python 3.13, but 3.11 or 3.12 is needed, "
        "for example: make book PYTHON=python3.11"
    ]


@pytest.mark.parametrize("lines", [["exit 1"], ["echo broken >&2", "exit 127"]])
def test_python_that_does_not_run(tmp_path, lines):
    python = fake_python(tmp_path, *lines)
    (sentence,) = setup_with(tmp_path, python)
    assert sentence.startswith(f"PYTHON={python} does not run; name a Python 3.11 or 3.12")


def test_missing_python(tmp_path):
    (sentence,) = setup_with(tmp_path, "no-such-python")
    assert sentence.startswith("PYTHON=no-such-python does not run; name a Python 3.11 or 3.12")


def test_python_without_venv(tmp_path):
    python = fake_python(tmp_path, 'case "$2" in *venv*) exit 1 ;; *) echo 3.11 ;; esac')
    (sentence,) = setup_with(tmp_path, python)
    assert sentence.startswith(f"PYTHON={python} lacks the modules venv and ensurepip")


def test_interrupted_setup_is_not_taken_for_done(tmp_path):
    """An earlier set-up is out of date, and the installation of the new one fails."""
    python = fake_python(tmp_path, 'case "$2" in venv) ;; *) echo 3.11 ;; esac')
    for name in NEEDED:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(shutil.which("false"))
    ready = tmp_path / ".venv/.ready"
    ready.touch()
    os.utime(ready, (0, 0))
    run = subprocess.run(["make", "setup", f"PYTHON={python}"], cwd=tmp_path, capture_output=True)
    assert run.returncode != 0
    assert not ready.exists()


def test_second_setup_does_nothing(tmp_path):
    for name in NEEDED:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.ready").touch()
    assert subprocess.run(["make", "-q", "setup"], cwd=tmp_path).returncode == 0


def test_the_shell_does_not_change_what_runs():
    """Python without asserts passes everything, and another backend draws no picture."""
    shell = {"PYTHONOPTIMIZE": "1", "MPLBACKEND": "agg", "PYTHONPATH": "/", "MKL_NUM_THREADS": "9"}
    shell |= {"OPENBLAS_NUM_THREADS": "9", "OMP_NUM_THREADS": "9"}
    run = subprocess.run(
        ["make", "-s", "--eval=show: ; @env", "show"],
        cwd=ROOT,
        env=os.environ | shell,
        capture_output=True,
        text=True,
        check=True,
    )
    seen = dict(line.split("=", 1) for line in run.stdout.splitlines() if "=" in line)
    assert {name: seen[name] for name in shell if name in seen} == {"OMP_NUM_THREADS": "1"}


def test_portable_runs_every_notebook_on_an_old_core_with_each_number_of_threads(tmp_path):
    for name in NEEDED:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/01_a.ipynb").touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    fake_python(
        tmp_path / ".venv/bin",
        'echo "$ATEN_CPU_CAPABILITY $MKL_CBWR $OPENBLAS_CORETYPE $OMP_NUM_THREADS: $*"',
        '[ "$OMP_NUM_THREADS" != 2 ]',
    )
    (tmp_path / ".venv/.ready").touch()
    run = subprocess.run(["make", "-s", "portable"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode != 0  # it fails with 2 threads, and says so
    one, two = (line for line in run.stdout.splitlines() if "Nehalem" in line)
    assert one.startswith("default COMPATIBLE Nehalem 1: -m pytest notebooks/01_a.ipynb --nbval ")
    assert two.startswith("default COMPATIBLE Nehalem 2: ")


def test_serve_takes_another_port(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serve.bind(tmp_path, port) as server:
            assert server.server_port != port
    assert capsys.readouterr().out.startswith(f"Port {port} cannot be used")


def test_serve_refuses_what_is_no_port():
    run = subprocess.run(
        [sys.executable, "-m", "cpnorm.serve", ".", "http"], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert run.stderr == "PORT=http is not a port; give a number from 0 to 65535.\n"
