"""Sources of installed packages, found and parsed without importing them, which takes seconds."""

import ast
import functools
import importlib.util
from pathlib import Path

DISTRIBUTIONS = {"megatron": "megatron-core"}
"""Package: the distribution that it comes with, where their names differ."""


def folder(package: str) -> Path:
    """Folder of an installed package. `ValueError` if there is none."""
    return _folders(package)[0]


def file(module: str) -> Path:
    """Source file of a dotted module. `ValueError` if there is none."""
    package, *rest = module.split(".")
    for root in _folders(package):
        path = Path(root, *rest).with_suffix(".py")
        if path.is_file():
            return path
    raise ValueError(f"{module} is not installed")


@functools.cache
def parsed(module: str) -> ast.Module:
    """Syntax tree of a dotted module. Do not write into it. `ValueError` as from `file`."""
    return ast.parse(file(module).read_text())


def _folders(package):
    """One, or for a namespace package, such as `megatron`, one or more."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = DISTRIBUTIONS.get(package, package)
        raise ValueError(f"{name} is not installed, but its sources are read: install it")
    return [Path(folder) for folder in spec.submodule_search_locations]
