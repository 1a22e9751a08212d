"""The package as others install it: a wheel, its declared requirements, no checkout."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/cpnorm"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = PROJECT["optional-dependencies"]
BOOK, RUN = ([Requirement(text) for text in EXTRAS[name]] for name in ("book", "run"))
BOOK_MODULES = ("claims", "execute", "figures", "sphinx_claims", "stored", "symbols")
"""What only the book runs; of `claims`, only its checks."""

CONFIG = str(ROOT / "tests/configs/question.yaml")
# What is declared


def third_party(path):
    """Top-level names that a module imports, anywhere in it, and that Python does not bring."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        yield from {n.partition(".")[0] for n in names} - {"cpnorm"} - sys.stdlib_module_names


def names(requirements):
    return {canonicalize_name(r.name) for r in requirements}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_every_import_is_declared(path):
    declared = names(DEPENDENCIES + RUN)
    if path.relative_to(PACKAGE).with_suffix("").parts[0] in BOOK_MODULES:
        declared |= names(BOOK)
    brings = packages_distributions()
    undeclared = {
        name
        for name in third_party(path)
        if not {canonicalize_name(d) for d in brings.get(name, ())} & declared
    }
    assert undeclared == set()


def test_an_import_within_a_function_is_seen(tmp_path):
    path = tmp_path / "some.py"
    path.write_text("import os, a.b\nfrom . import c\ndef f():\n    from d.e import g\n")
    assert set(third_party(path)) == {"a", "d"}


def pins():
    """Distribution -> releases that the requirements files pin, whatever the Python."""
    found = {}
    for name in ("requirements.txt", "requirements-releases.txt"):
        for line in (ROOT / name).read_text().splitlines():
            if line and not line.startswith("#"):
                pinned = Requirement(line)
                (one,) = pinned.specifier
                found.setdefault(canonicalize_name(pinned.name), []).append(Version(one.version))
    return found


def breaking(version):
    """The first release after `version` that may break: the next major, of 0.x the next minor."""
    if version.major:
        return Version(f"{version.major + 1}")
    return Version(f"0.{version.minor + 1}")


@pytest.mark.parametrize("requirement", DEPENDENCIES + RUN + BOOK, ids=lambda r: r.name)
def test_ranges_hold_every_pin_and_end_at_the_next_breaking_release(requirement):
    pinned = pins()[canonicalize_name(requirement.name)]
    assert all(version in requirement.specifier for version in pinned)
    ends = {one.operator: Version(one.version) for one in requirement.specifier}
    assert ends.keys() == {">=", "<"}
    assert ends["<"] == breaking(max(pinned))
    assert ends[">="].release[0] == min(pinned).major


# What is installed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: a build leaves folders, and takes old ones along."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=unwanted)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder)
    (path,) = folder.glob("*.whl")
    return path


def pip(*arguments):
    options = ("--quiet", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", *map(str, arguments), *options]
    subprocess.run(command, check=True, capture_output=True, text=True, env=plain())


def plain(**more):
    """The environment without what points a Python at the checkout."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | more


def closure(requirements):
    """Names of the distributions that the requirements need on this Python, one through another."""
    found, todo = set(), [(r, extra) for r in requirements for extra in ("", *r.extras)]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for text in distribution(name).requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(needed, extra) for extra in ("", *needed.extras)]
    return {name for name, _ in found}


@pytest.fixture
def installed(wheel, tmp_path):
    """`installed(missing=())`: a folder with the wheel and all it declares for `explain`, as links
    to what is installed here, and with the sources of verl and Megatron-Core, but for `missing`."""

    def make(missing=()):
        folder = tmp_path / "site"
        pip("install", "--no-deps", "--no-compile", "--target", folder, wheel)
        needed = closure(r for r in DEPENDENCIES if r.name != "verl")
        for name in (needed | {"verl", "megatron-core"}) - set(missing):
            for top in {file.parts[0] for file in distribution(name).files} - {"..", "__pycache__"}:
                if not (folder / top).exists():
                    (folder / top).symlink_to(distribution(name).locate_file(top))
        return folder

    return make


def run(folder, *arguments):
    """A Python that sees the folder and its own library, in another working directory."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=elsewhere,
        env=plain(PYTHONPATH=str(folder)),
        capture_output=True,
        text=True,
    )


def test_the_wheel_holds_the_register_and_neither_tests_nor_book(wheel):
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name}
        register = file.read("cpnorm/claims.yml")
    sources = {f"cpnorm/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")}
    assert held == sources | {"cpnorm/claims.yml"}
    assert register == (PACKAGE / "claims.yml").read_bytes()


def test_explain_says_outside_what_it_says_in_the_checkout(installed):
    folder = installed()
    where = run(folder, "-c", "import cpnorm; print(cpnorm.__file__)").stdout.strip()
    assert Path(where) == folder / "cpnorm/__init__.py"
    assert not (folder / "torch").exists()
    outside = run(folder, "-m", "cpnorm", "explain", CONFIG)
    inside = subprocess.run(
        [sys.executable, "-m", "cpnorm", "explain", CONFIG],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (outside.stderr, outside.returncode) == ("", 0)
    assert outside.stdout == inside.stdout
    assert "statement of the book" in outside.stdout


def test_check_says_what_a_run_needs(installed):
    found = run(installed(), "-m", "cpnorm", "check", CONFIG)
    assert (found.stdout, found.returncode) == ("", 2)
    assert found.stderr == (
        "cpnorm: torch is not installed: pip install 'cpnorm[run]' has what a run needs.\n"
    )


def test_without_verl_one_sentence_says_so(installed):
    found = run(installed(missing=["verl"]), "-m", "cpnorm", "explain", CONFIG)
    assert (found.stdout, found.returncode) == ("", 2)
    assert found.stderr == (
        "cpnorm: verl is not installed, but its sources are read: install it.\n"
    )


def test_without_megatron_nothing_is_covered(installed):
    folder = installed(missing=["megatron-core"])
    found = run(folder, "-m", "cpnorm", "explain", CONFIG)
    assert (found.stderr, found.returncode) == ("", 1)
    assert "megatron-core is not installed" in found.stdout


def test_reading_the_register_imports_no_parser_of_the_book():
    program = (
        "import sys; from cpnorm import claims; assert claims.load()['gather']; "
        "assert not {'markdown_it', 'mdit_py_plugins', 'sphinx', 'docutils'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
