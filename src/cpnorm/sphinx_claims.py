"""Sphinx extension: shows `claims.yml` in the book and links every name in it.

Directives: `{evidence} LABEL`, the box under a statement; `{claims-table}`, all statements;
`{test-sources}`, the source of each test that the register names. Each writes MyST that Sphinx
resolves, so that a name which does not exist is a warning, and the strict build fails.
"""

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from cpnorm import claims

logger = logging.getLogger(__name__)
STATUS = {"proved": "proved", "measured": "*measured*", "open": "**open**"}


def cell_label(reference):
    """Link target of `path#tag`: `cell-tag`."""
    return "cell-" + reference.partition("#")[2]


def test_label(reference):
    """Link target of `tests/test_x.py::test_y`: `test-x-test-y`."""
    return nodes.make_id(reference.removeprefix("tests/").replace(".py::", "-"))


def references(entry):
    """MyST references to the statements that `entry` rests on."""
    return ", ".join(f"{{prf:ref}}`{label}`" for label in entry.get("uses") or [])


def links(entry):
    """`(heading, MyST links)`: status, what `entry` rests on, each kind of evidence it names."""
    yield "Status", f"{{ref}}`{entry['status']} <statuses>`"
    if entry.get("uses"):
        yield "Rests on", references(entry)
    for heading, field in (("Derived in", "derivation"), ("Run in", "checks")):
        if entry.get(field):
            yield (
                heading,
                ", ".join(
                    f"{{ref}}`{r.partition('#')[2]} <{cell_label(r)}>`" for r in entry[field]
                ),
            )
    if entry.get("tests"):
        shown = (f"{{ref}}`{t.rpartition('::')[2]} <{test_label(t)}>`" for t in entry["tests"])
        yield "Tests", ", ".join(shown)
    if entry.get("mutants"):
        yield "Faults that these must catch", ", ".join(f"`{name}`" for name in entry["mutants"])
    if entry.get("reason"):
        yield "Open", entry["reason"].strip().replace("\n", " ")


class MystDirective(SphinxDirective):
    """A directive that is replaced by the MyST which `lines` yields."""

    def run(self):
        node = nodes.Element()
        source = self.get_source_info()[0]
        self.state.nested_parse(StringList(list(self.lines()), source), self.content_offset, node)
        return node.children


class Evidence(MystDirective):
    required_arguments = 1

    def lines(self):
        entry = self.config.claims.get(self.arguments[0])
        if entry is None:
            logger.warning(
                "claims.yml has no entry %s", self.arguments[0], location=self.get_location()
            )
            return
        yield from ("::::{admonition} Evidence", ":class: seealso evidence", "")
        yield from (f"- {heading}: {text}" for heading, text in links(entry))
        yield "::::"


def counts(entry):
    """How much evidence of each kind `entry` names, or why it is open."""
    if entry.get("reason"):
        return entry["reason"].strip().replace("\n", " ")
    kinds = {"derivation": "derivation", "checks": "run", "tests": "test", "mutants": "fault"}
    named = ((len(entry.get(field, [])), word) for field, word in kinds.items())
    return ", ".join(f"{n} {word}{'s' * (n > 1)}" for n, word in named if n)


class ClaimsTable(MystDirective):
    def lines(self):
        yield from ("::::{list-table}", ":header-rows: 1", ":widths: 16 32 10 16 26", "")
        yield from ("* - Statement", "  - says that", "  - Status", "  - Rests on")
        yield "  - Evidence, or why open"
        for label, entry in self.config.claims.items():
            yield f"* - {{prf:ref}}`{label}`"
            yield f"  - {entry['title']}"
            yield f"  - {STATUS.get(entry['status'], entry['status'])}"
            yield f"  - {references(entry)}"
            yield f"  - {counts(entry)}"
        yield "::::"


class TestSources(MystDirective):
    def lines(self):
        named = {t for entry in self.config.claims.values() for t in entry.get("tests") or []}
        for reference in sorted(named):
            path, _, name = reference.partition("::")
            yield from (f"::::{{literalinclude}} /{path}", ":language: python", ":lineno-match:")
            yield from (f":pyobject: {name.replace('::', '.')}", f":caption: {reference}")
            yield from (f":name: {test_label(reference)}", "::::", "")


def load_claims(app, config):
    """Sphinx keeps the register with its configuration: a change in it re-reads every page."""
    config.claims = claims.load(app.srcdir)


def anchor_cells(app, doctree):
    """Give each notebook cell that the register names its id and its label."""
    docname, std = app.env.docname, app.env.get_domain("std")
    for tag, paths in claims.claimed_tags(app.config.claims).items():
        if f"{docname}.ipynb" not in paths:
            continue
        for node in doctree.findall(nodes.container):
            if f"tag_{tag}" in node["classes"]:
                label = f"cell-{tag}"
                node["ids"].append(label)
                std.anonlabels[label] = docname, label
                std.labels[label] = docname, label, tag


def setup(app):
    app.add_config_value("claims", {}, "env", dict)
    app.add_directive("evidence", Evidence)
    app.add_directive("claims-table", ClaimsTable)
    app.add_directive("test-sources", TestSources)
    app.connect("config-inited", load_claims)
    app.connect("doctree-read", anchor_cells)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
