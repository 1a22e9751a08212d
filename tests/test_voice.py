"""The book says a thing once: pages quote numbers from runs, and refer where they do not state."""

import json
import re
from pathlib import Path

import pytest

from cpnorm import regimes
from cpnorm.evidence import load
from cpnorm.explain import NO_OBJECTIVE

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "book").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

GLUE = re.compile(r"\{glue:text\}`[^`:]*::([\w-]+):?[^`]*`")
UNITS = r"%|percent\b|per cent\b|times (?:as|too|what)\b|cases\b|comparisons\b|configurations\b"
TYPED = re.compile(rf"\d[\d.,]*\s*(?:{UNITS})")
MISLEADING = re.compile(r"times too\b|times (?:larger|smaller|more)\b|too \w+ by\b|% too\b")
LARGEST = re.compile(r"largest gradient\b")
TOKENS = re.compile(r"count-(?:at|from)-(\d+)-cp(\d+)$")


def blocks(text):
    """Paragraphs, tables and list items of MyST `text`, without code."""
    text = re.sub(r"^( *)```[a-z]*\n.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [block for block in re.split(r"\n\s*\n|\n(?=- |\d\. )", text) if block.strip()]


def prose(path):
    """The text of a page, or of a notebook's Markdown cells."""
    if path.suffix == ".md":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def printed(notebook):
    """What a notebook's cells print."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [out for cell in cells for out in cell.get("outputs", [])]
    return "\n".join("".join(out.get("text", "")) for out in outputs)


def glued(notebook, name):
    """The stored value under which `notebook` glues `name`, as text."""
    for cell in json.loads((ROOT / "notebooks" / notebook).read_text())["cells"]:
        for out in cell.get("outputs", []):
            if out.get("metadata", {}).get("scrapbook", {}).get("name") == name:
                return "".join(out["data"]["application/papermill.record/text/plain"])
    raise KeyError(name)


def typed_numbers(text):
    """Percentages, multiples and counts of cases that stand in `text` as digits, not as glue."""
    return [found for block in blocks(GLUE.sub("‹›", text)) for found in TYPED.findall(block)]


def wordings(text):
    """Wordings that leave open what a number is a multiple of, or what an error is relative to."""
    return [m[0] for rule in (MISLEADING, LARGEST) for m in rule.finditer(text)]


def without_tokens(text):
    """Names of glued T/K whose block does not say the tokens and the CP size that they are for."""
    for block in blocks(text):
        said = GLUE.sub("", block)
        for name in GLUE.findall(block):
            if found := TOKENS.match(name):
                wanted = rf"\b{found[1]}\b", rf"\bCP {found[2]}\b"
                if not all(re.search(one, said) for one in wanted):
                    yield name


def unreferenced(text, topic, reference):
    """Blocks of `text` on `topic`, a pattern for each thing named, without the `reference`."""
    for block in blocks(re.sub(r"^#.*$", "", text, flags=re.MULTILINE)):
        if all(re.search(p, block, re.IGNORECASE) for p in topic) and reference not in block:
            yield block


STATED_ONCE = {
    # what is said: (page that says it, patterns of a block that speaks of it, reference it needs)
    "what clipping hides": (
        "08_count.md",
        (r"\bclip(s|ped|ping)?\b", r"T/K|T / K|grad_norm|\bfactor\b|AdamW"),
        "{prf:ref}`count-optimizer`",
    ),
    "which losses have no objective": (
        "02_objective.md",
        (r"\b(one|common) objective\b|not additive|add up to one", r"loss|setting"),
        "<no-objective>",
    ),
}


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS, ROOT / "README.md"], ids=lambda p: p.name)
def test_numbers_are_quoted_and_wordings_are_plain(path):
    text = prose(path)
    assert typed_numbers(text) == []
    assert wordings(text) == []
    assert list(without_tokens(text)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_print_plain_wordings(path):
    assert wordings(printed(path)) == []


@pytest.mark.parametrize("what", STATED_ONCE)
def test_what_is_stated_once_is_referred_to_elsewhere(what):
    home, topic, reference = STATED_ONCE[what]
    others = [page for page in PAGES if page.name != home]
    found = {page.name: list(unreferenced(page.read_text(), topic, reference)) for page in others}
    assert {name: texts for name, texts in found.items() if texts} == {}
    assert any(reference in page.read_text() for page in others)
    assert list(unreferenced((ROOT / "book" / home).read_text(), topic, reference))


def no_objective_list(text):
    """Losses that the page's list names before any option or mode."""
    section = text.partition("(no-objective)=")[2]
    heads = re.findall(r"^(`.*)\n: ", section, re.MULTILINE)
    return {n for h in heads if " with" not in h for n in re.findall(r"(?<!})`(\w+)`", h)}


def test_losses_without_objective_are_alike_everywhere():
    measured = set(re.findall(r"\w+", glued("05_losses.ipynb", "losses-without-objective")))
    page = (ROOT / "book/02_objective.md").read_text()
    assert no_objective_list(page) == measured == set(NO_OBJECTIVE)
    assert no_objective_list(page.replace("`geo_mean`, ", "`gpg`, ")) != measured
    for head in (
        "`bypass_mode` with `rollout_is_batch_normalize`",
        "`seq-mean-token-sum-norm` without `loss_scale_factor`",
    ):
        assert f"\n{head}\n: " in page


def factor_functions(text):
    """Factor -> the function that the table row of a page or notebook gives for it."""
    return dict(re.findall(r"^\| \$(f_\d)\$ \|[^`\n]*`(\w+)`", text, re.MULTILINE))


def test_factors_stand_in_the_same_functions_everywhere():
    wanted = {f"f_{n}": name for n, name in enumerate(regimes.STAGES[1:], 1)}
    for path in ("book/01_notation.md", "book/09_regimes.md", "notebooks/08_regimes.ipynb"):
        assert factor_functions(prose(ROOT / path)) == wanted, path
    for path in [*PAGES, *NOTEBOOKS]:
        if path.name not in ("01_notation.md", "08_regimes.ipynb"):
            assert "gradient_scaling_factor" not in prose(path), path.name
    assert factor_functions("| $f_3$ | what | `other` in `x.py` |") != wanted


def test_cases_are_counted_alike():
    """Those that ran, not those that were asked for: the walkthrough's rows have a test there."""
    records = [load(path) for path in sorted((ROOT / "evidence").glob("engine-*.json"))]
    assert int(glued("06_engine.ipynb", "engine-cases")) == sum(r.cases for r in records)
    table = (ROOT / "notebooks/06_engine.ipynb").read_text()
    for record in records:
        version = record.provenance["versions"]["megatron-core"]
        assert f"| {version} | {record.cases} |" in table
        assert record.cases < record.measured["cases"]  # one is refused, and does not count


@pytest.mark.parametrize(
    "text",
    [
        "It is up to 98 % too large.",
        "It is 1.19 times as large.",
        "- one\n- The sweep has 764 cases.",
        "By 7 percent.",
        "| CP 8 | 7% |",
        "{glue:text}`../n.ipynb::x:.0f` % on CP 8 and 98 % on CP 64.",
    ],
)
def test_a_typed_number_is_noticed(text):
    assert len(typed_numbers(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "{glue:text}`../n.ipynb::x:.2f` times as large on CP 8, {glue:text}`../n.ipynb::y:d` %.",
        "```python\nx = 98 % 7\n```",
        "$D C$ times as large, of 8k tokens, CP 1 to 128.",
    ],
)
def test_a_quoted_number_is_fine(text):
    assert typed_numbers(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "The gradient is $D C$ times too large.",
        "It is too large by $T/K$.",
        "{glue:text}`../n.ipynb::x:.0f` % too large",
        "2 times larger",
        "off by 1e-7 of the largest gradient",
    ],
)
def test_a_misleading_wording_is_noticed(text):
    assert wordings(text)


QUOTED = "{glue:text}`../notebooks/07_count.ipynb::count-at-100-cp8:.2f`"


@pytest.mark.parametrize("words", ["{} on CP 8", "100 tokens: {}", "100 tokens, CP 80: {}", "{}"])
def test_a_figure_without_its_tokens_or_ranks_is_noticed(words):
    assert list(without_tokens(words.format(QUOTED))) == ["count-at-100-cp8"]
    assert not list(without_tokens(f"100 tokens: {QUOTED} on CP 8"))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("what clipping hides", "Clipping sees all of it, AdamW only its change."),
        ("what clipping hides", "- One.\n- Only the clipped norm is off by $T/K$."),
        ("which losses have no objective", "For `geo_mean`, a loss, there is no one objective."),
    ],
)
def test_a_second_statement_is_noticed(what, text):
    _, topic, reference = STATED_ONCE[what]
    assert list(unreferenced(text, topic, reference))
    assert not list(unreferenced(f"{text} {reference}", topic, reference))
