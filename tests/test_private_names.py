"""Private names of other packages: few, each with its reason, and still where they were.

A private name may move in any release. The list is all that `src/cpnorm` uses: a test fails where
it uses another, and one where a listed name is gone.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from sympy.printing.latex import LatexPrinter
from torch.distributed import distributed_c10d

from cpnorm.sources import parsed

PACKAGE = Path(__file__).parents[1] / "src/cpnorm"


def in_source(module, *path):
    """Whether verl's source has it: what importing that module costs is 10 s."""
    body = parsed(module).body
    for name in path:
        found = [node for node in body if getattr(node, "name", None) == name]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


ENGINE = "verl.workers.engine.megatron.transformer_impl"
ALLOWED = {
    "_latex": (
        lambda: LatexPrinter.printmethod == "_latex",
        "how SymPy asks an expression for its LaTeX",
    ),
    "_print": (
        lambda: hasattr(LatexPrinter, "_print"),
        "how a method of a SymPy printer prints a part",
    ),
    "_print_Sum": (
        lambda: hasattr(LatexPrinter, "_print_Sum"),
        "what a SymPy printer calls for a sum",
    ),
    "_amp_foreach_non_finite_check_and_unscale_": (
        lambda: hasattr(torch, "_amp_foreach_non_finite_check_and_unscale_"),
        "what Megatron-Core's optimizer calls to undo float16's loss scale",
    ),
    "_world": (
        lambda: isinstance(distributed_c10d._world.pg_map, dict),
        "torch has no public list of its process groups",
    ),
    "_routed_num_tokens": (
        lambda: in_source(ENGINE, "MegatronEngine", "_routed_num_tokens"),
        "verl's count of routed tokens, which the book is about",
    ),
}
"""Private name: (whether it is where it was, why it is used)."""

TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""Public, whatever their names: methods of a named tuple."""


def private(name):
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def foreign(module):
    """Whether a dotted module is neither Python's nor this package's."""
    top = module.partition(".")[0]
    return top != "cpnorm" and top not in sys.stdlib_module_names


def root(node):
    """The name that a chain of attributes starts from, "" if it starts from something else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_super(node):
    return isinstance(node, ast.Call) and root(node.func) == "super"


class Module:
    """One file's nodes, and the names that its imports bind: another package's, or Python's."""

    def __init__(self, text):
        self.nodes = list(ast.walk(ast.parse(text)))
        self.theirs, self.pythons, self.imported = set(), set(), set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    self._bind(alias.name, bound, alias.name)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    dotted = f"{node.module}.{alias.name}"
                    self._bind(node.module, alias.asname or alias.name, dotted)

    def _bind(self, module, bound, dotted):
        if foreign(module):
            self.theirs.add(bound)
            self.imported.add(dotted)
        elif not module.startswith("cpnorm"):
            self.pythons.add(bound)

    def own(self):
        """Private names that the file itself gives to something."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield from [node.attr] * (root(node) == "self")

    def called(self):
        """Attributes that the file reads, but for those of `super()`."""
        attributes = (node for node in self.nodes if isinstance(node, ast.Attribute))
        return {node.attr for node in attributes if not is_super(node.value)}


def found(texts):
    """Private names of other packages that the files use: name -> files. `texts` by file.

    They are an import; an attribute of what is imported, of `super()`, or of anything where no file
    defines the name; a method that no file calls, in a class with bases: a base calls it; and what
    `mock.patch`, `getattr` and the like are given as a string.
    """
    modules = {file: Module(text) for file, text in texts.items()}
    own = {name for module in modules.values() for name in module.own()}
    called = {name for module in modules.values() for name in module.called()}
    packages = {dotted.partition(".")[0] for m in modules.values() for dotted in m.imported}
    uses = defaultdict(set)
    for file, module in modules.items():
        names = [d for d in module.imported if any(map(private, d.split(".")))]
        for node in module.nodes:
            match node:
                case ast.Attribute(value=value, attr=name) if private(name):
                    theirs = root(node) in module.theirs or is_super(value) or name not in own
                    if theirs and root(node) not in module.pythons and name not in TUPLES:
                        names.append(name)
                case ast.ClassDef(bases=[_, *_], body=body):
                    methods = {one.name for one in body if isinstance(one, ast.FunctionDef)}
                    names += filter(private, methods - called)
                case ast.Constant(value=str(text)) if re.fullmatch(r"\w+(\.\w+)+", text):
                    first, *parts = text.split(".")
                    names += filter(private, parts) if first in packages else ()
                case ast.Call(func=function, args=[_, ast.Constant(value=str(name)), *_]):
                    by_name = ast.unparse(function).endswith(("attr", "patch.object"))
                    names += [name] if by_name and private(name) and name not in own else []
        for name in names:
            uses[name].add(file)
    return dict(uses)


def test_only_the_listed_private_names_are_used():
    texts = {str(p.relative_to(PACKAGE)): p.read_text() for p in PACKAGE.rglob("*.py")}
    uses = found(texts)
    unlisted = {name: files for name, files in uses.items() if name not in ALLOWED}
    assert unlisted == {}
    assert ALLOWED.keys() - uses.keys() == set(), "listed, and used no more"


@pytest.mark.parametrize("name", ALLOWED)
def test_a_listed_name_is_still_there(name):
    there, why = ALLOWED[name]
    assert there(), f"{name} has moved or gone: {why}"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from hydra._internal.x import Y", {"hydra._internal.x.Y"}),
        ("import hydra._internal as h", {"hydra._internal"}),
        ("from torch import _C", {"torch._C"}),
        ("import torch as t\nt.a._b.c", {"_b"}),
        ("import torch\ndef _b(): ...\ntorch._b", {"_b"}),
        ("def f(x):\n    return x._b", {"_b"}),
        ("def f(x):\n    return x()._b", {"_b"}),
        ("from v import E\nclass A(E):\n    def _b(self):\n        return super()._b()", {"_b"}),
        ("from v import E\nclass A(E):\n    def _b(self): ...", {"_b"}),
        ("import torch\np = 'torch.a._b'", {"_b"}),
        ("from unittest import mock\nmock.patch.object(x, '_b')", {"_b"}),
        ("getattr(x, '_b', None)", {"_b"}),
        ("import os\nos._exit(1)", set()),
        ("job._replace(x=1)", set()),
        ("class A:\n    def _b(self): ...\n    def c(self):\n        return self._b()", set()),
        (
            "class A:\n    def __init__(self):\n        self._b = 1\ndef f(a):\n    return a._b",
            set(),
        ),
        ("from v import E\nE.__name__\n_ = E", set()),
        ("from cpnorm.x import _y", set()),
    ],
)
def test_what_counts_as_a_private_name_of_another(text, names):
    assert set(found({"some.py": text})) == names


def test_a_name_that_is_not_in_a_source_is_noticed():
    assert in_source(ENGINE, "MegatronEngine")
    assert not in_source(ENGINE, "MegatronEngine", "_no_such_method")
    assert not in_source(ENGINE, "NoSuchEngine", "_routed_num_tokens")
