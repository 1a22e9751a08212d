"""The register of statements, `claims.yml`, and every way in which it can disagree with the book.

An entry's key is the `:label:` of a numbered statement in `book/*.md`. `problems` compares the
register with the statements, notebook cells, tests and mutants that it names, and with what each
statement rests on.
"""

import ast
import json
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from importlib.resources import files
from pathlib import Path

import yaml

FILE = "src/cpnorm/claims.yml"

STATUSES = ("proved", "measured", "open")
"""From the strongest to the weakest. A statement rests on none that is weaker than itself."""

KINDS = {
    "theorem": "proved",
    "lemma": "proved",
    "proposition": "proved",
    "corollary": "proved",
    "observation": "measured",
    "conjecture": "open",
}
"""Directive of a statement -> the status that it says."""

REQUIRED = {"title", "chapter", "status"}
OPTIONAL = {"uses", "reason", "derivation", "checks", "tests", "mutants"}


def load(root=None):
    """The register, label -> entry in the file's order: that of the checkout `root`, without one
    that of this package."""
    file = files("cpnorm") / "claims.yml" if root is None else Path(root, FILE)
    return yaml.safe_load(file.read_text(encoding="utf-8")) or {}


def directives(text):
    """Yield `(name, argument, content)` for each directive in MyST `text`, nested ones included."""
    from markdown_it import MarkdownIt
    from mdit_py_plugins.colon_fence import colon_fence_plugin

    for token in MarkdownIt().use(colon_fence_plugin).parse(text):
        head = re.match(r"\{([\w:-]+)\}\s*(.*)", token.info)
        if token.type in ("fence", "colon_fence") and head:
            yield head[1], head[2], token.content
            yield from directives(token.content)


def statements(root):
    """Yield `(label, kind, chapter)` for each numbered statement; `label` is "" where it lacks."""
    for page in sorted(Path(root, "book").glob("*.md")):
        for name, _, content in directives(page.read_text()):
            domain, _, kind = name.rpartition(":")
            if domain == "prf" and kind in KINDS:
                label = re.search(r"^:label:\s*(\S+)\s*$", content, re.MULTILINE)
                yield label[1] if label else "", kind, f"book/{page.name}"


def texts(root):
    """Label -> text of each statement, and of the proof under it or None."""
    found = {}
    for page in sorted(Path(root, "book").glob("*.md")):
        label = None
        for name, _, content in directives(page.read_text()):
            domain, _, kind = name.rpartition(":")
            if domain == "prf" and kind in KINDS:
                head = re.search(r"^:label:\s*(\S+)\s*$", content, re.MULTILINE)
                label = head[1] if head else ""
                found[label] = content, None
            elif name == "prf:proof" and label is not None:
                found[label] = found[label][0], content
    return found


def citations(root):
    """Label -> labels of the statements that its text and its proof refer to.

    A reference to an equation is one to the statement that the equation stands in.
    """
    found, equations = {}, {}
    stated = {label: text + (proof or "") for label, (text, proof) in texts(root).items()}
    for label, text in stated.items():
        names = re.findall(r"^\$\$\s*\(([\w-]+)\)", text, re.MULTILINE)
        equations |= dict.fromkeys(names, label)
    for label, text in stated.items():
        cited = re.findall(r"\{prf:ref\}`(?:[^`<]*<)?([\w-]+)>?`", text)
        cited += [equations.get(name) for name in re.findall(r"\{eq\}`([\w-]+)`", text)]
        found[label] = set(cited) - {label, None}
    return found


def boxes(root):
    """Labels of the evidence boxes in the book."""
    for page in sorted(Path(root, "book").glob("*.md")):
        for name, argument, _ in directives(page.read_text()):
            if name == "evidence":
                yield argument.strip()


def tags(notebook):
    """Tags of a notebook's code cells, as often as they occur."""
    for cell in json.loads(Path(notebook).read_text())["cells"]:
        if cell["cell_type"] == "code":
            yield from cell["metadata"].get("tags", [])


def functions(module):
    """Names of the functions in a Python file, a method's as `Class::method`."""
    for node in ast.parse(Path(module).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from (
                f"{node.name}::{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)
            )


def mutant_names(module):
    """Keys of the dict `MUTANTS` in a Python file."""
    for node in ast.parse(Path(module).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MUTANTS":
            yield from (key.value for key in node.value.keys)


def cell_problem(root, reference):
    """What is wrong with the reference `path#tag` to a notebook's code cell, or None."""
    path, _, tag = reference.partition("#")
    if not tag or tag != tag.lower():
        return f"{reference} is not of the form notebook.ipynb#tag-in-lower-case"
    if not Path(root, path).is_file():
        return f"{path} does not exist"
    count = Counter(tags(Path(root, path)))[tag]
    if count != 1:
        return f"{count} code cells of {path} carry the tag {tag}, not one"
    return None


def test_problem(root, reference):
    """What is wrong with the reference `path::function` to a test, or None."""
    path, _, name = reference.partition("::")
    if not Path(root, path).is_file():
        return f"{path} does not exist"
    if name not in functions(Path(root, path)):
        return f"{path} has no function {name}"
    return None


def entry_problems(root, entry):
    """Yield what is wrong within one entry, whatever the book says."""
    if missing := REQUIRED - entry.keys():
        yield f"lacks {', '.join(sorted(missing))}"
    if unknown := entry.keys() - REQUIRED - OPTIONAL:
        yield f"has unknown fields: {', '.join(sorted(unknown))}"
    status = entry.get("status")
    if status not in STATUSES:
        yield f"status is {status!r}, allowed is one of {', '.join(STATUSES)}"
    if (status == "open") != bool(entry.get("reason")):
        yield "needs a reason exactly when it is open"
    if status == "proved" and not entry.get("derivation"):
        yield "is proved but names no derivation"
    if status == "measured" and entry.get("derivation"):
        yield "is measured but names a derivation"
    if status != "open" and not (entry.get("checks") or entry.get("tests")):
        yield f"is {status} but names neither checks nor tests"
    for reference in [*(entry.get("derivation") or []), *(entry.get("checks") or [])]:
        yield cell_problem(root, reference)
    for reference in entry.get("tests") or []:
        yield test_problem(root, reference)
    module = Path(root, "src/cpnorm/mutants.py")
    if module.is_file():
        for name in set(entry.get("mutants") or []) - set(mutant_names(module)):
            yield f"mutants.py has no mutant {name}"


def uses_problems(register, cited):
    """Yield what is wrong with `uses`, given what the statements' texts refer to.

    No edge leads to a weaker status, so none that is proved rests on one that is not, however far.
    """
    for label, entry in register.items():
        uses = entry.get("uses") or []
        for name in uses:
            used = register.get(name, {}).get("status")
            if name not in register:
                yield f"{label}: uses {name}, which is not in claims.yml"
            elif {entry.get("status"), used} <= set(STATUSES) and (
                STATUSES.index(used) > STATUSES.index(entry["status"])
            ):
                yield f"{label}: is {entry['status']} but uses {name}, which is {used}"
        if repeated := [name for name, count in Counter(uses).items() if count > 1]:
            yield f"{label}: uses {', '.join(repeated)} twice"
        if label in cited:
            for name in sorted(cited[label] - set(uses)):
                yield f"{label}: its text refers to {name}, which is not among its uses"
            for name in sorted(set(uses) - cited[label]):
                yield f"{label}: uses {name}, to which its text does not refer"
    try:
        TopologicalSorter({x: entry.get("uses") or [] for x, entry in register.items()}).prepare()
    except CycleError as error:
        yield f"{error.args[1][0]}: rests on itself, by {', '.join(error.args[1][1:])}"


def problems(root):
    """Every disagreement between register, book, notebooks and tests, one sentence each."""
    register, found = load(root), []
    stated = {label: (kind, chapter) for label, kind, chapter in statements(root)}
    proofs = {label: proof for label, (_, proof) in texts(root).items()}
    for label, count in Counter(label for label, *_ in statements(root)).items():
        if not label:
            found.append(f"{count} numbered statements have no :label:")
        elif count > 1:
            found.append(f"{label}: {count} statements carry this label")
    for label in stated.keys() - register.keys() - {""}:
        found.append(f"{label}: stated in {stated[label][1]}, but not in claims.yml")
    for label, entry in register.items():
        found += [f"{label}: {problem}" for problem in entry_problems(root, entry) if problem]
        if label not in stated:
            found.append(f"{label}: in claims.yml, but not stated in the book")
            continue
        kind, chapter = stated[label]
        if bool(proofs.get(label)) != (KINDS[kind] == "proved"):
            found.append(f"{label}: a proof stands under what is proved, and under nothing else")
        if KINDS[kind] != entry.get("status"):
            found.append(f"{label}: status is {entry.get('status')!r}, but it is stated as {kind}")
        if chapter != entry.get("chapter"):
            found.append(f"{label}: chapter is {entry.get('chapter')}, but it stands in {chapter}")
    found += uses_problems(register, citations(root))
    shown = Counter(boxes(root))
    for label in register.keys() | shown.keys():
        if label not in register:
            found.append(f"{label}: an evidence box for it, but no entry in claims.yml")
        elif shown[label] != 1:
            found.append(f"{label}: {shown[label]} evidence boxes in the book, not one")
    for tag, paths in claimed_tags(register).items():
        if len(paths) > 1:
            found.append(f"{tag}: the tag is claimed in several notebooks: {', '.join(paths)}")
    return sorted(found)


def claimed_tags(register):
    """Tag -> sorted notebooks in which the register claims a cell of that tag."""
    found = {}
    for entry in register.values():
        for reference in [*(entry.get("derivation") or []), *(entry.get("checks") or [])]:
            path, _, tag = reference.partition("#")
            found.setdefault(tag, set()).add(path)
    return {tag: sorted(paths) for tag, paths in found.items()}
