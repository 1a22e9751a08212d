"""The text for a discussion: its links hit, its tables and formulas are whole, its script runs."""

import re
import runpy
from importlib.metadata import version
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from cpnorm import claims, source_links, walkthrough
from cpnorm.cli import main
from cpnorm.evidence import load
from cpnorm.sources import file

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def text():
    return walkthrough.text(ROOT)


def test_it_fits_a_comment(text):
    assert len(text) < walkthrough.LIMIT


def test_the_command_prints_it(text, capsys):
    assert main(["walkthrough"]) == 0
    assert capsys.readouterr().out == text


def test_outside_the_repository_the_command_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(walkthrough, "__file__", str(tmp_path / "a/b/walkthrough.py"))
    assert main(["walkthrough"]) == 2
    assert capsys.readouterr().err.startswith("cpnorm: the walkthrough needs the repository")


def test_a_text_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(walkthrough, "LIMIT", 100)
    with pytest.raises(ValueError, match="allowed are fewer than 100"):
        walkthrough.text(ROOT)


def test_every_link_hits_the_line_it_quotes(text):
    links = re.findall(r"\]\((https://[^)]+)\)", text)
    assert len(links) == len(walkthrough.STEPS)
    for address, (module, _, quoted, _) in zip(links, walkthrough.STEPS, strict=True):
        tag, path, number = re.fullmatch(r".*/blob/([^/]+)/(.+)#L(\d+)", address).groups()
        name = "verl" if module.startswith("verl") else "megatron-core"
        assert tag == {"verl": "v", "megatron-core": "core_v"}[name] + version(name)
        lines = file(module).read_text().splitlines()
        assert file(module).as_posix().endswith(path)
        assert quoted in lines[int(number) - 1]


@pytest.mark.parametrize(
    ("name", "quoted", "message"),
    [
        ("no_such_function", "x", "has no no_such_function"),
        ("agg_loss", "no such text", "agg_loss in .* has no line with 'no such text'"),
        ("agg_loss", "def compute_policy_loss_gspo", "has no line with"),
    ],
)
def test_a_line_that_is_gone_is_an_error(name, quoted, message):
    with pytest.raises(ValueError, match=message):
        source_links.link("verl.trainer.ppo.core_algos", name, quoted)


def test_a_module_that_is_gone_is_an_error():
    with pytest.raises(ValueError, match=r"verl\.no_such_module is not installed"):
        file("verl.no_such_module")


def test_tables_and_blocks_are_whole(text):
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
    rows = sum(token.type == "tr_open" for token in tokens)
    assert rows == sum(line.startswith("|") for line in text.splitlines()) - 3  # rules of tables
    assert sum(token.type == "table_open" for token in tokens) == 3
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert outside.count("$$") == 2
    assert outside.count(r"\begin{aligned}") == outside.count(r"\end{aligned}") == 1
    assert outside.count("<details>") == outside.count("</details>") == 1


def test_every_statement_is_there_with_its_status(text):
    for label, entry in claims.load(ROOT).items():
        row = f"| {label} | {entry['title']} | {entry['status']} |"
        assert (f"- *{label}*, " if entry["status"] == "open" else row) in text


def test_numbers_are_those_of_the_records(text):
    for path in (ROOT / "evidence").glob("engine-*.json"):
        record = load(path)
        exact = [one.residual for one in record.records if one.exact and not one.message]
        row = next(
            line
            for line in text.splitlines()
            if record.provenance["versions"]["megatron-core"] in line and line.startswith("|")
        )
        assert f"| {record.cases} | {max(exact):.0e} |" in row
        assert record.provenance["date"] in row


def test_the_script_in_it_runs(text, capsys):
    script = Path(walkthrough.__file__).with_name("one_minute.py")
    assert script.read_text() in text
    found = runpy.run_path(str(script))
    assert found["K"] < found["T"]
    said = f"T = {found['T']}, K = {found['K']}: the gradient without sharding, times "
    assert capsys.readouterr().out.startswith(said)
