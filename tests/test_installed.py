"""What is known of releases: the table of what was examined, and what differs from it."""

import ast
import dataclasses
import importlib
import json
import re
import shutil
import sys
import tokenize
from importlib import metadata
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from cpnorm import case, cli, examine, examined, installed, sources
from cpnorm.examined import AUX, EVERY, FACTS, TABLES, Megatron, changed, rows
from cpnorm.fingerprint import Module, Sources
from cpnorm.releases import BESIDE, INSTALLED
from cpnorm.sources import folder

ENGINE = "verl.workers.engine.megatron.transformer_impl"
CORE_ALGOS = "verl.trainer.ppo.core_algos"
LOSSES = "verl.workers.utils.losses"
POSTPROCESS = "MegatronEngineWithLMHead.postprocess_micro_batch_func"


def beside(version):
    return Path(sys.prefix, "releases", f"verl-{version}")


# The table


@pytest.mark.parametrize("version", [*BESIDE, INSTALLED])
def test_the_table_is_what_the_sources_of_verl_give(version):
    seen = Sources(beside(version) if version in BESIDE else None)
    assert seen.version("verl") == version
    assert examine.facts("verl", seen) == FACTS["verl"][version]
    for row in rows("verl"):
        assert row.prints[version] == seen.fingerprint(row.module, row.name), row
    assert set(examined.losses(version)) == set(seen.module(CORE_ALGOS).losses())


def test_the_table_is_what_the_installed_megatron_core_gives():
    version, seen = metadata.version("megatron-core"), Sources()
    facts = FACTS["megatron-core"][version]
    assert examine.facts("megatron-core", seen) == Megatron(facts.dynamic_groups)
    for row in rows("megatron-core"):
        assert row.prints[version] == seen.fingerprint(row.module, row.name), row


@pytest.mark.parametrize("distribution", TABLES)
def test_every_release_has_facts_and_a_column(distribution):
    for row in rows(distribution):
        assert tuple(row.prints) == tuple(FACTS[distribution]), row
    functions = [(row.module, row.name, row.part) for row in rows(distribution)]
    assert len(set(functions)) == len(functions)
    assert all(any(row.prints.values()) for row in rows(distribution))


def test_nothing_differs_here_for_any_loss():
    assert {loss: installed.differences(loss) for loss in case.losses()} == dict.fromkeys(
        case.losses(), ()
    )
    assert installed.bridge_differences() == ()


def test_facts_of_the_installed_release():
    assert installed.engine() == installed.Engine(counts=True, guard=False, refuses_bshd=True)
    modes = {loss: installed.aggregated(loss, "mine") for loss in case.losses()}
    own = {"sapo": "seq-mean-token-mean", "geo_mean": None}
    assert modes == {loss: own.get(loss, "mine") for loss in case.losses()}


@pytest.mark.parametrize("version", BESIDE)
def test_facts_are_those_of_the_version(monkeypatch, version):
    relabel(monkeypatch, verl=version)
    facts = FACTS["verl"][version]
    assert installed.engine() == facts[:3]
    assert installed.aggregated("gspo", "token-mean") == "seq-mean-token-mean"
    with pytest.raises(ValueError, match="loss is 'mine', examined are vanilla, "):
        installed.aggregated("mine", "token-mean")


def relabel(monkeypatch, **versions):
    every = installed.versions() | {k.replace("_", "-"): v for k, v in versions.items()}
    monkeypatch.setattr(installed, "versions", lambda: every)


# A release that was not examined, or is not as it was


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of verl's examined files, relabelled and in place of the installed ones."""
    folder = tmp_path / "verl"
    for module in {row.module for row in rows("verl")}:
        target = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sources.file(module), target)
    real = sources._folders
    monkeypatch.setattr(
        sources, "_folders", lambda name: [folder] if name == "verl" else real(name)
    )

    def change(module, *pairs, version="0.10.0"):
        path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        text = path.read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)
        info = tmp_path / f"verl-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return change


NEW = "verl 0.10.0 was not examined, examined are 0.8.0, 0.9.0, 0.9.1"


def says(name, version="0.10.0"):
    return f"{name} of verl {version} differs from what was examined"


HELPER = (
    "            return local_sum, local_num_tokens, output\n",
    "            return self._with_count(local_sum, local_num_tokens, output)\n",
)


BY_NAME = "loss_mat=pg_losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode"
BY_POSITION = "pg_losses, response_mask, loss_agg_mode"


def test_a_count_that_a_helper_returns(copy):
    copy(ENGINE, HELPER)
    assert installed.differences("gspo") == (NEW, says(POSTPROCESS))


def test_an_engine_of_another_name(copy):
    copy(ENGINE, ("MegatronEngineWithLMHead", "MegatronLMEngine"))
    found = installed.differences("gspo")
    assert found[:2] == (NEW, says(POSTPROCESS))
    assert found[-1].startswith("3 more functions of verl 0.10.0 differ")


def test_a_mode_that_is_passed_by_position(copy):
    copy(CORE_ALGOS, (BY_NAME, BY_POSITION))
    assert installed.differences("gspo") == (NEW, says("policy loss gspo"))
    assert installed.differences("geo_mean") == (NEW,)


@pytest.mark.parametrize("loss", ["gspo", "geo_mean", "bypass_mode"])
def test_the_same_functions_in_a_release_that_nobody_examined(copy, loss):
    copy(ENGINE)
    assert installed.differences(loss) == (NEW,)
    for function in (installed.engine, lambda: installed.aggregated(loss, "token-mean")):
        with pytest.raises(ValueError, match=r"verl is 0\.10\.0, examined are 0\.8\.0, 0\.9\.0"):
            function()


def test_an_examined_release_with_a_changed_function(copy):
    copy(ENGINE, HELPER, version=INSTALLED)
    assert installed.differences("gspo") == (says(POSTPROCESS, INSTALLED),)


def test_an_examined_release_with_another_comment(copy):
    copy(ENGINE, ("# Static CP replicas contain", "# All replicas contain"), version=INSTALLED)
    assert installed.differences("gspo") == ()


def test_what_is_changed_in_one_loss_is_no_matter_to_another(copy):
    copy(CORE_ALGOS, ("max=10.0)  # clamp", "max=20.0)  # clamp"), version=INSTALLED)
    assert installed.differences("gspo") == (says("policy loss gspo", INSTALLED),)
    assert installed.differences("vanilla") == ()


def test_what_a_loss_calls_is_part_of_it(copy):
    of_reinforce = "pg_losses = -advantages * log_prob * rollout_is_weights"
    copy(CORE_ALGOS, (of_reinforce, f"{of_reinforce} * 2"), version=INSTALLED)
    assert installed.differences("bypass_mode") == (says("policy loss bypass_mode", INSTALLED),)
    assert installed.differences("vanilla") == ()


def test_a_loss_of_ones_own(copy):
    mine = '@register_policy_loss("mine")\ndef compute_policy_loss_mine(*args):\n    pass\n\n\n'
    at = '@register_policy_loss("gspo")\n'
    copy(CORE_ALGOS, (at, mine + at), version=INSTALLED)
    assert installed.differences("mine") == (
        f"policy loss mine of verl {INSTALLED} was not examined",
    )
    assert installed.differences("gspo") == ()


def test_a_file_that_does_not_parse(copy):
    copy(LOSSES, ("def ppo_loss(", "def ppo_loss(("), version=INSTALLED)
    assert installed.differences("gspo") == (says("ppo_loss", INSTALLED),)


@pytest.mark.parametrize(
    "after",
    [
        "agg_loss = compute_entropy_loss\n",
        "from verl.other import agg_loss\n",
        "try:\n    from verl.other import agg_loss\nexcept ImportError:\n    pass\n",
        "def agg_loss(**options):\n    return 0\n",
        "agg_loss.__code__ = compute_entropy_loss.__code__\n",
        "from verl.other import *\n",
    ],
)
def test_a_name_that_is_bound_again(copy, after):
    last = "    return pg_loss, pg_metrics\n"
    copy(CORE_ALGOS, (last, last), version=INSTALLED)
    path = sources.file(CORE_ALGOS)
    path.write_text(path.read_text() + "\n\n" + after)
    assert says("agg_loss", INSTALLED) in installed.differences("gspo")


def test_an_import_from_elsewhere(copy):
    old = "from verl.workers.utils.padding import no_padding_2_padding"
    copy(LOSSES, (old, old.replace("padding import", "other import")), version=INSTALLED)
    assert installed.differences("gspo") == (says("ppo_loss", INSTALLED),)


def test_a_method_that_a_class_did_not_have(copy):
    old = "    def prepare_model_inputs(self, batch: TensorDict):\n"
    new = "    def optimizer_step(self):\n        return 0.0\n\n" + old
    copy(ENGINE, (old, new), version=INSTALLED)
    assert installed.differences("gspo") == (says("class MegatronEngineWithLMHead", INSTALLED),)


@pytest.mark.parametrize("distribution", ["verl", "megatron-core"])
def test_not_installed(monkeypatch, distribution):
    relabel(monkeypatch, **{distribution.replace("-", "_"): None})
    assert f"{distribution} is not installed" in installed.differences("gspo")


def test_another_megatron_core(monkeypatch):
    relabel(monkeypatch, megatron_core="0.99.0")
    (found,) = installed.differences("gspo")
    assert found.startswith("megatron-core 0.99.0 was not examined, examined are 0.16.1, ")
    assert installed.aux_factor(2, 1) is None
    with pytest.raises(ValueError, match=r"megatron-core is 0\.99\.0, examined are 0\.16\.1"):
        installed.has_dynamic_groups()


def test_another_megatron_bridge(monkeypatch):
    relabel(monkeypatch, megatron_bridge="0.9.9")
    found = installed.bridge_differences()
    assert found[0] == "megatron-bridge 0.9.9 was not examined, examined are 0.6.2"


# What a fingerprint sees


def functions(module):
    """Functions of a module that the table names: name, first and last line."""
    named = {row.name for row in rows("verl") if row.name and row.module == module}
    tree = ast.parse(TEXTS[module])
    owners = [(tree, ""), *((c, f"{c.name}.") for c in tree.body if isinstance(c, ast.ClassDef))]
    for owner, prefix in owners:
        for node in owner.body:
            first = [
                d.args[0] for d in getattr(node, "decorator_list", ()) if getattr(d, "args", 0)
            ]
            names = [f"policy loss {getattr(a, 'value', '')}" for a in first]
            for name in named.intersection([*names, f"{prefix}{getattr(node, 'name', '')}"]):
                yield name, node.lineno, node.end_lineno


TEXTS = {
    module: sources.file(module).read_text()
    for module in (ENGINE, CORE_ALGOS, LOSSES, "verl.models.mcore.util")
}
TOKENS = {
    module: list(tokenize.generate_tokens(StringIO(text).readline))
    for module, text in TEXTS.items()
}
FUNCTIONS = [(module, *one) for module in TEXTS for one in functions(module)]
BEFORE = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def tokens(module, first, last, *kinds):
    """Tokens of these kinds on these lines, without strings that are statements."""
    for before, token in pairwise(TOKENS[module]):
        alone = token.type == tokenize.STRING and before.type in BEFORE
        if first <= token.start[0] <= last and token.type in kinds and not alone:
            yield token


def edited(module, row, column, old, new):
    """The module's text with `old` at a row, from 1, and a column replaced by `new`."""
    lines = TEXTS[module].splitlines(keepends=True)
    assert lines[row - 1][column:].startswith(old)
    lines[row - 1] = lines[row - 1][:column] + new + lines[row - 1][column + len(old) :]
    return "".join(lines)


def before(module, name):
    (found,) = (r for r in rows("verl") if (r.module, r.name) == (module, name))
    return found.prints[INSTALLED]


@given(st.data())
def test_one_changed_character_of_a_name_or_constant_is_seen(data):
    module, name, first, last = data.draw(st.sampled_from(FUNCTIONS))
    kinds = tokenize.NAME, tokenize.NUMBER, tokenize.STRING
    token = data.draw(st.sampled_from(list(tokens(module, first, last, *kinds))))
    text, (row, column) = token.string, token.start
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.sampled_from("0123456789_abcxyzABC"))
    assume(row == token.end[0] and text[at].isalnum() and new != text[at])
    try:
        module_after = Module(edited(module, row, column + at, text[at], new))
    except SyntaxError:
        reject()
    else:
        assert module_after.fingerprint(name) != before(module, name)


@given(st.data())
def test_comments_layout_and_docstrings_are_not_seen(data):
    module, name, first, last = data.draw(st.sampled_from(FUNCTIONS))
    ends = list(tokens(module, first, last, tokenize.NEWLINE))
    row, column = data.draw(st.sampled_from(ends)).start
    words = data.draw(st.text("ab #'\"\\x{}", max_size=20))
    after = data.draw(st.sampled_from(["  # " + words, "\n\n\n" + " " * 7 + "# " + words, " "]))
    text = edited(module, row, column, "\n", after + "\n")
    assert Module(text).fingerprint(name) == before(module, name)


def test_docstrings_are_not_seen():
    found = 0
    for module, name, first, last in FUNCTIONS:
        for one, token in pairwise(TOKENS[module]):
            if not (first <= token.start[0] <= last and token.type == tokenize.STRING):
                continue
            if one.type == tokenize.INDENT:
                text = edited(module, *token.start, token.string[:3], token.string[:3] + "new ")
                assert Module(text).fingerprint(name) == before(module, name)
                found += 1
    assert found > 10


def test_fingerprints_are_alike_in_every_python():
    """`ast.dump` is not: 3.12 and 3.13 changed what it leaves out."""
    text = """
@register_policy_loss("mine")
def f(a: int = 1, *, b=None, **c) -> "str":
    from m import n as k
    x = [i ** 2 for i in a if i not in (1, 2.5, 1j, b"x", ...)]
    with k(f"{x!r:>{b}} {a=}") as y, open(y):
        return lambda *z: {**c, "u": (yield z)}
"""
    assert Module(text).fingerprint("f") == "fd861312"
    assert Module(text).fingerprint("policy loss mine") == Module(text).fingerprint("f")
    assert Module(text).fingerprint("g") is None


# A configuration key


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("actor_rollout_ref.actor.megatron.grad_offload", ("0.8.0", "0.9.0")),
        ("actor_rollout_ref.actor.megatron.param_offload", ("0.8.0", "0.9.0")),
        ("actor_rollout_ref.actor.megatron.use_fused_kernels", ("0.8.0", "0.9.0")),
        ("trainer.use_v1", ("0.9.0",)),
        ("actor_rollout_ref.actor.megatron.nothing", ()),
        ("actor_rollout_ref.nothing.at_all", ()),
        ("trainer.nnodes.more", ()),
        ("nothing", ()),
        ("", ()),
    ],
)
def test_other_releases_that_know_a_key(key, known):
    assert installed.other_releases(key) == known


def test_releases_that_are_not_unpacked(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert installed.other_releases("trainer.nnodes") == ()


# The auxiliary loss


@pytest.mark.parametrize("release", [v for v, f in FACTS["megatron-core"].items() if f.aux])
def test_the_auxiliary_loss_where_it_was_measured(monkeypatch, release):
    version = metadata.version("megatron-core")
    monkeypatch.setitem(FACTS["megatron-core"], version, FACTS["megatron-core"][release])
    factors = {size: installed.aux_factor(*size) for size in ((2, 1), (4, 1), (4, 2), (16, 1))}
    old = {(2, 1): "1/2", (4, 1): "1/4", (4, 2): "1/8", (16, 1): None}
    new = dict.fromkeys(old, "1") | {(16, 1): None}
    assert factors == (new if release == "0.19.2" else old)


def test_the_auxiliary_loss_of_changed_functions(monkeypatch):
    router = "megatron.core.transformer.moe.router"
    monkeypatch.setattr(Sources, "fingerprint", lambda self, module, name="": "changed")
    assert {one.part for one in changed("megatron-core", "0.16.1", Sources())} == {EVERY, AUX}
    assert router in {one.module for one in changed("megatron-core", "0.16.1", Sources(), [AUX])}
    assert installed.aux_factor(2, 1) is None


# The command, and the script that examines a release


def test_the_command_lists_what_was_examined(capsys):
    assert cli.main(["releases"]) == 0
    out = capsys.readouterr().out
    assert f"verl {INSTALLED}: installed, as examined\n" in out
    assert "verl 0.8.0: not installed\n" in out
    assert cli.main(["releases", "--json"]) == 0
    found = {(r["distribution"], r["version"]): r for r in json.loads(capsys.readouterr().out)}
    assert found.keys() == {(d, v) for d, known in FACTS.items() for v in known}
    mine = found["verl", INSTALLED]
    assert (mine["installed"], mine["differs"], mine["facts"]["counts"]) == (True, [], True)
    assert found["verl", "0.8.0"]["differs"] is None


def test_the_command_on_a_release_that_was_not_examined(copy, capsys):
    copy(ENGINE, HELPER)
    assert cli.main(["releases"]) == 0
    assert "verl 0.10.0: installed, was not examined\n" in capsys.readouterr().out


def test_the_command_on_an_examined_release_that_was_changed(copy, capsys):
    copy(ENGINE, HELPER, version=INSTALLED)
    assert cli.main(["releases"]) == 0
    says = f"verl {INSTALLED}: installed, differs from what was examined: {POSTPROCESS}\n"
    assert says in capsys.readouterr().out


def test_the_script_on_examined_releases(capsys):
    examine.main()
    examine.main(str(beside("0.8.0")))
    lines = capsys.readouterr().out.split("\n\n")
    core = metadata.version("megatron-core")
    for release in (f"verl {INSTALLED}", f"megatron-core {core}", "verl 0.8.0"):
        assert f"{release} is as it was examined." in lines


def test_what_the_script_prints_is_what_the_table_needs(copy, monkeypatch):
    copy(ENGINE, ("routed_num_tokens / dp_size", "routed_num_tokens / max(dp_size, 1)"))
    text = examine.report("verl", Sources())
    head, add = text.split('Add to FACTS["verl"]')
    assert head.splitlines()[1:-1] == [f"  {ENGINE} {POSTPROCESS}, for every verdict"]
    facts, table = add.split('Put in place of TABLES["verl"]:\n')
    line = facts.splitlines()[1].strip()
    assert line.startswith('"0.10.0": Verl(counts=True, guard=False, refuses_bshd=True, modes=')
    entry = eval("{" + line + "}", vars(examined))  # the line as it would stand in the table
    monkeypatch.setitem(FACTS, "verl", FACTS["verl"] | entry)
    monkeypatch.setitem(TABLES, "verl", table)
    rows.cache_clear()
    try:
        assert installed.differences("gspo") == ()
        assert [row.prints["0.9.1"] for row in rows("verl")] == [r.prints[INSTALLED] for r in ROWS]
    finally:
        monkeypatch.undo()
        rows.cache_clear()


ROWS = rows("verl")


@pytest.mark.parametrize(
    ("module", "change", "line"),
    [
        (ENGINE, ("MegatronEngineWithLMHead", "MegatronLMEngine"), "counts='?', guard='?'"),
        (ENGINE, ("return local_sum, local_num_tokens, output", "return self.out()"), "counts='?'"),
        (
            CORE_ALGOS,
            (BY_NAME, BY_POSITION),
            "'gspo': '?'",
        ),
    ],
)
def test_the_script_proposes_no_fact_that_it_cannot_read(copy, module, change, line):
    copy(module, change)
    assert line in examine.report("verl", Sources())


def test_the_script_on_a_folder_without_a_release(tmp_path):
    with pytest.raises(SystemExit, match="has none of verl, megatron-core, megatron-bridge"):
        examine.main(str(tmp_path))


def test_declared_fields_are_those_of_the_dataclasses():
    """Of every class that verl's composed configurations name."""
    files = (folder("verl") / "trainer/config").glob("_generated_*.yaml")
    targets = {t for f in files for t in re.findall(r"_target_: (\S+)", f.read_text())}
    assert len(targets) > 40
    for target in sorted(targets):
        module, _, name = target.rpartition(".")
        try:
            owner = getattr(importlib.import_module(module), name)
        except ImportError:  # an engine that is not installed
            continue
        assert installed.declared(target) == {f.name for f in dataclasses.fields(owner)}, target
    assert installed.declared("verl.workers.config.NoSuch") == frozenset()
    assert installed.declared("os.system") == frozenset()
