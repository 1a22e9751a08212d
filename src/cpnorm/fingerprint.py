"""Fingerprints of functions in a source file: what they say, not how it is written.

A change of comments, docstrings or layout leaves a fingerprint as it is. Every Python that reads
the file gives the same one.
"""

import ast
import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from cpnorm import sources

DIGITS = 8
"""Hexadecimal digits of a fingerprint."""


def of_bytes(data: bytes) -> str:
    """Fingerprint of a whole file, comments included."""
    return hashlib.sha256(data).hexdigest()[:DIGITS]


class Module:
    """Functions of one module, given as its source. `SyntaxError` if that is none."""

    def __init__(self, source: str | bytes):
        self._names = defaultdict(list)
        self._losses = defaultdict(list)
        for name, node in _bound(ast.parse(source).body):
            self._names[name].append(node)
            for decorator in getattr(node, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and decorator.args:
                    self._losses[_registered(decorator)].append(node)

    def fingerprint(self, name: str) -> str | None:
        """Fingerprint of what `name` stands for, None if the module does not have it.

        `f` is a function or a class, `C.f` a method, `class C` a class without its bodies (bases
        and decorators, and the names in it), `policy loss x` what verl registers under that name.
        All definitions of a name count, and a later assignment to it. So does what it names in its
        own module: functions, classes, constants and imports, and in turn what those name.
        """
        found = list(self._find(name))
        if not found:
            return None
        return of_bytes("\n".join(self._closure(found, name)).encode())

    def losses(self) -> tuple[str, ...]:
        """Names under which functions are registered as policy losses, in the module's order."""
        return tuple(name for name in self._losses if name is not None)

    def _find(self, name):
        kind, _, rest = name.rpartition(" ")
        owner, _, method = rest.partition(".")
        if kind == "policy loss":
            yield from self._losses.get(rest, ())
        elif kind == "class":
            yield from map(_header, self._names.get(rest, ()))
        elif not method:
            yield from self._names.get(rest, ())
        else:
            for node in self._names.get(owner, ()):
                if isinstance(node, ast.ClassDef):
                    yield from (n for inner, n in _bound(node.body) if inner == method)
                else:
                    yield node

    def _closure(self, found, name):
        seen = {id(node) for node in found}
        for node in found:  # grows
            yield from _said(node)
            if name.startswith("class "):
                continue
            used = ["*", *(n.id for n in ast.walk(node) if isinstance(n, ast.Name))]
            for inner in dict.fromkeys(used):
                fresh = [n for n in self._names.get(inner, ()) if id(n) not in seen]
                seen.update(map(id, fresh))
                found += fresh


class Sources:
    """Modules of one release: of the installed packages, or of those unpacked in `folder`."""

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._data = functools.cache(self._read)
        self.module: Callable[[str], Module | None] = functools.cache(self._parsed)
        """A dotted module, None if it is not there or does not parse."""

    def version(self, distribution: str) -> str | None:
        """Its version, None if it is not there."""
        path = {} if self._folder is None else {"path": [str(self._folder)]}
        return next((d.version for d in metadata.distributions(name=distribution, **path)), None)

    def tree(self, name: str) -> ast.Module:
        """Syntax tree of a dotted module, empty if it is not there or does not parse."""
        return ast.parse(self._data(name)) if self.module(name) else ast.Module([], [])

    def fingerprint(self, module: str, name: str = "") -> str | None:
        """Fingerprint of the file of `module`, or of what `name` stands for in it.

        None if it is not there, for a name also if the file does not parse.
        """
        if not name:
            data = self._data(module)
            return None if data is None else of_bytes(data)
        found = self.module(module)
        return found and found.fingerprint(name)

    def _read(self, module):
        if self._folder is not None:
            path = Path(self._folder, *module.split(".")).with_suffix(".py")
            return path.read_bytes() if path.is_file() else None
        try:
            return sources.file(module).read_bytes()
        except ValueError:
            return None

    def _parsed(self, name):
        data = self._data(name)
        try:
            return None if data is None else Module(data)
        except (SyntaxError, ValueError, RecursionError):
            return None


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names that statements bind, each with what binds it; those under `if`, `try`, ... too."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                one = type(node)(**{**dict(ast.iter_fields(node)), "names": [alias]})
                yield alias.asname or alias.name.partition(".")[0], one
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in {n.id: None for t in targets for n in ast.walk(t) if _is_name(n)}:
                yield name, node
        else:
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from _bound(getattr(node, field, []))


def _is_name(node):
    return isinstance(node, ast.Name)


def _registered(decorator):
    named = getattr(decorator.func, "id", "") == "register_policy_loss"
    return getattr(decorator.args[0], "value", None) if named else None


def _header(node):
    """A class without its bodies. Anything else as it is."""
    if not isinstance(node, ast.ClassDef):
        return node
    names = sorted(name for name, _ in _bound(node.body))
    fields = {**dict(ast.iter_fields(node)), "body": [ast.Expr(ast.Name(n)) for n in names]}
    return ast.ClassDef(**fields)


def _said(node) -> Iterator[str]:
    """A syntax tree as words: no positions, docstrings or type comments."""
    if isinstance(node, ast.AST):
        yield type(node).__name__
        for field, value in ast.iter_fields(node):
            if value is not None and value != [] and field not in ("kind", "type_comment", "ctx"):
                yield field
                yield from _said(_merged(value) if isinstance(node, ast.JoinedStr) else value)
        yield "end"
    elif isinstance(node, list):
        yield "["
        for inner in node:
            if not _is_text(inner):
                yield from _said(inner)
        yield "]"
    else:
        yield repr(node)


def _merged(values):
    """Parts of an f-string, with neighbouring texts as one: 3.12 splits them as others do not."""
    merged = [ast.Constant("")]
    for part in values:
        if isinstance(part, ast.Constant) and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(merged[-1].value + part.value)
        else:
            merged.append(part)
    return [part for part in merged if not isinstance(part, ast.Constant) or part.value]


def _is_text(node):
    """A docstring, or another string that stands alone as a statement."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
