"""The command, called as a process calls it: exit status, stdout, stderr."""

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpnorm import verl_config
from cpnorm.cli import main
from cpnorm.settings import Settings
from cpnorm.user_file import SIZE

CONFIGS = Path(__file__).parent / "configs"
QUESTION = str(CONFIGS / "question.yaml")
ACTOR = "actor_rollout_ref.actor"
PER_TOKEN = f"+{ACTOR}.megatron.override_transformer_config.calculate_per_token_loss=True"
ONE_BY_ONE = f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def run(*argv):
    """Exit status, stdout and stderr of the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(a) for a in argv])
    return status, out.getvalue(), err.getvalue()


def refused(*argv):
    """The one sentence with which the command refuses, after `cpnorm: `."""
    status, out, err = run("explain", *argv)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"cpnorm: [^\n]+[^.\n]\.\n", err), err
    assert "Traceback" not in err
    assert len(err) < 500
    return err.removeprefix("cpnorm: ")


def file(folder, content):
    """A configuration with this content: text, bytes or a mapping."""
    path = folder / "config.yaml"
    if isinstance(content, dict):
        content = yaml.safe_dump(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def nested(key, value):
    """A mapping that holds `value` at the dotted `key`, and an actor for Megatron."""
    whole = {"actor_rollout_ref": {"actor": {"megatron": {"context_parallel_size": 2}}}}
    node = whole
    *parents, last = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return whole


def test_verdict_on_the_questions_configuration():
    status, out, err = run("explain", QUESTION)
    assert (status, err) == (0, "")
    assert out.startswith("SAFE: ")
    assert "In the per-token regime: safe" in out
    assert "In the averaging regime: safe" in out
    assert "\x1b" not in out


def test_the_books_example_is_what_the_command_prints():
    """But the line of versions, and the table of statements that follows."""
    _, out, _ = run("explain", QUESTION, "actor_rollout_ref.model.path=Qwen/Qwen3.5-9B")
    printed = [line.rstrip() for line in out.split("\nstatement of the book")[0].splitlines()]
    example = (CONFIGS / "question.txt").read_text().splitlines()
    assert example[1].startswith("verl 0.9.1, ")
    assert printed[:1] + printed[2:] == example[:1] + example[2:]


def test_json():
    status, out, _ = run("explain", QUESTION, "--json")
    verdict = json.loads(out)
    assert status == verdict["exit_status"] == 0
    assert verdict["status"] == "safe"
    assert verdict["path"]["CP"] == 2
    assert [o["regime"] for o in verdict["outcomes"]] == ["per-token", "averaging"]


def test_lengths(tmp_path):
    (tmp_path / "lengths").write_text("# prompt, response\n4 4\n10, 3\n\n20 7\n4 5\n")
    options = [
        f"{ACTOR}.megatron.context_parallel_size=8",
        ONE_BY_ONE,
    ]
    lengths = ["--lengths", tmp_path / "lengths", "--dp", 1]
    status, out, _ = run("explain", QUESTION, PER_TOKEN, *options, *lengths)
    assert status == 0
    assert "T = 57, K = 48, T/K = 19/16 = 1.187500" in out


def test_exit_status_1():
    status, out, err = run("explain", QUESTION, f"{ACTOR}.policy_loss.loss_mode=geo_mean")
    assert (status, err) == (1, "")
    assert out.startswith("NOT SAFE: ")
    assert run("explain", QUESTION, "actor_rollout_ref.model.use_fused_kernels=True")[0] == 1


def test_help():
    status, out, _ = run("--help")
    assert status == 0
    assert "explain" in out
    status, out, _ = run("explain", "--help")
    assert status == 0
    assert "cpnorm explain train.sh NNODES=2 MODEL_PATH=/models/Qwen3-8B\n" in out
    assert "2  unusable input, or verl itself refuses the configuration\n" in out


@pytest.mark.parametrize("argv", [[], ["explain"], ["explain", QUESTION, "--no-such"], ["no-such"]])
def test_bad_usage(argv):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"cpnorm: [^\n]+\.\n", err)


def test_help_and_verdict_import_neither_torch_nor_verl():
    code = (
        "import sys; from cpnorm.cli import main; before = set(sys.modules); main(sys.argv[1:]);"
        "assert not {'torch', 'verl', 'megatron.core'} & set(sys.modules);"
        "assert 'explain' in sys.argv or not {'hydra', 'cpnorm.explain'} & set(sys.modules)"
    )
    for argv in (["--help"], ["explain", QUESTION]):
        subprocess.run([sys.executable, "-c", code, *argv], check=True, capture_output=True)


def test_module_and_colours_on_a_terminal():
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "cpnorm", "explain", QUESTION]
    process = subprocess.Popen(command, stdout=theirs, env=env)
    os.close(theirs)
    out = b""
    with contextlib.suppress(OSError):  # a terminal whose other end is closed
        while part := os.read(ours, 4096):
            out += part
    os.close(ours)
    assert process.wait() == 0
    assert b"\x1b[1;32mSAFE\x1b[0m" in out


# Bad input


@pytest.mark.parametrize(
    "content",
    [
        "",
        "hello",
        "- actor",
        "a: [",
        "a: 1\na: 2",
        "\t",
        b"\x00\x01\x02",
        b"\xff\xfe",
        b"\x93NUMPY" + bytes(range(256)),
        "actor_rollout_ref:",
        "actor_rollout_ref: 5",
        "actor_rollout_ref: {actor: 5}",
        "actor_rollout_ref: {actor: []}",
        "actor_rollout_ref: {actor: }",
        "actor: 7",
        "trainer: {nnodes: 2}",
        "[" * 100_000,
        "a: " * 50 + "1",
        "{a: " * 500 + "1" + "}" * 500,
        "actor: &x {megatron: *x}",
        "actor: {a: &x [1, 1], b: [*x, *x]}",
        "defaults: [mine]",
        "defaults: 5",
        "defaults: [{actor@actor_rollout_ref.actor: ../../../../etc/passwd}]",
        "defaults: [{../actor: megatron_actor}]",
        "defaults: [{model_engine: nothing}]",
        "defaults: [{a: 1, b: 2}]",
        "defaults: [[]]",
    ],
)
def test_what_is_no_configuration(tmp_path, content):
    refused(file(tmp_path, content))


def test_huge_files(tmp_path):
    path = file(tmp_path, "actor: {megatron: {}} #" + "x" * SIZE)
    assert "larger than" in refused(path)
    (tmp_path / "sparse").open("wb").truncate(2**40)
    assert "larger than" in refused(tmp_path / "sparse")


def test_what_is_no_file(tmp_path):
    assert "not a file" in refused(tmp_path)
    assert "not a file" in refused(tmp_path / "missing")
    assert "not a file" in refused("/dev/zero")
    assert "not a file" in refused("")
    refused("x" * 5000)
    refused("a\0b")


CANARY = "actor: {{strategy: !!python/object/apply:{name} [{argument!r}], megatron: {{}}}}"


@pytest.mark.parametrize(
    ("name", "argument"),
    [("os.system", "touch canary"), ("pathlib.Path", "x"), ("subprocess.call", "touch canary")],
)
def test_tags_are_refused(tmp_path, monkeypatch, name, argument):
    monkeypatch.chdir(tmp_path)
    assert "tag" in refused(file(tmp_path, CANARY.format(name=name, argument=argument)))
    assert not Path("canary").exists()


@pytest.mark.parametrize("tag", ["!!python/name:os.system", "!!str", "!mine", "!!set", "!"])
def test_any_tag_is_refused(tmp_path, tag):
    assert "tag" in refused(file(tmp_path, f"actor: {{strategy: {tag} megatron}}"))


def test_targets_are_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = "{_target_: os.system, command: touch canary}"
    content = f"""
        actor_rollout_ref:
          actor: {{_target_: os.system, megatron: {{_target_: os.system}}, optim: {call}}}
        ray_kwargs: {call}
        hydra: {{callbacks: {{mine: {call}}}, searchpath: [file:///tmp]}}
    """
    assert run("explain", file(tmp_path, content))[0] == 1  # not covered
    assert not Path("canary").exists()


@pytest.mark.parametrize(
    "value",
    [
        "${no.such.key}",
        "${oc.env:CPNORM_IS_NOT_SET}",
        "${no_such_resolver:1}",
        "${hydra:runtime.cwd}",
        "${actor_rollout_ref.actor.loss_agg_mode}",
        "${actor_rollout_ref.actor.policy_loss.loss_mode}",
        "${oc.decode:'[1'}",
        "${oc.env:[1]}",
        "${",
        "${a",
        "???",
    ],
)
def test_interpolations_that_do_not_resolve(tmp_path, value):
    content = nested(f"{ACTOR}.loss_agg_mode", value)
    content["actor_rollout_ref"]["actor"]["policy_loss"] = {
        "loss_mode": "${actor_rollout_ref.actor.loss_agg_mode}"
    }
    refused(file(tmp_path, content))


@pytest.mark.parametrize(
    "override",
    [
        "",
        "=",
        "x",
        "=1",
        "no.such.key=1",
        "~no.such.key",
        "+trainer.nnodes=1",
        f"{ACTOR}.megatron.context_parallel_size=[",
        f"{ACTOR}.megatron.context_parallel_size=int(x)",
        f"{ACTOR}.megatron.context_parallel_sizes=2",
        f"+{ACTOR}.megatron.context_parallel_sizes=2",
        f"{ACTOR}.megatron=5",
        f"{ACTOR}=null",
        f"~{ACTOR}",
        f"~{ACTOR}=5",
        "actor_rollout_ref=5",
        "trainer=[]",
        "model_engine=no_such",
        "~model_engine",
        "actor@actor_rollout_ref.actor=no_such",
        "actor@actor_rollout_ref.actor=../../x",
        "no_such@actor_rollout_ref.actor=megatron_actor",
        "[" * 20_000,
        f"{ACTOR}.loss_agg_mode={'[' * 500}",
        "\ud800",
        "a\nb=1",
    ],
)
def test_bad_overrides(override):
    refused(QUESTION, "--", override)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.nnodes=1,2",
        "trainer.nnodes=choice(1,2)",
        "trainer.nnodes=range(1,3)",
    ],
)
def test_sweeps_are_refused(override):
    assert "is a sweep of Hydra's, allowed is one value" in refused(QUESTION, override)


@pytest.mark.parametrize(
    "override",
    [
        "hydra.run.dir=/tmp",
        "hydra/launcher=basic",
        "hydra.searchpath=[file:///tmp]",
        "+hydra.callbacks.x._target_=os.system",
    ],
)
def test_hydras_own_overrides_are_left_out(override):
    """They say where its output goes; nothing is run with them."""
    assert run("explain", QUESTION, override) == run("explain", QUESTION)


LACKS = "is no key of verl 0.9.1"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            f"{ACTOR}.loss_agg_mod=token-mean",
            f"{LACKS}, did you mean 'loss_agg_mode'",
        ),
        (
            f"{ACTOR}.megatron.override_ddp_config.x=1",
            f"{LACKS}, write + before it to add it",
        ),
        (f"no.such.key.{'x' * 200}=1", f"{LACKS}, write + before it to add it"),
        (f"+{ACTOR}.loss_agg_mode=token-mean", "is there already, write it without +"),
    ],
)
def test_a_key_that_is_not_there_or_is_added_twice(override, message):
    key = override.split("=")[0].removeprefix("+")
    assert refused(QUESTION, override).strip() == (
        f"verl itself refuses this configuration: {key} {message}."
    )


FIELDS = [f for f in fields(Settings) if f.metadata]
WRONG = st.one_of(
    st.integers(max_value=-1),
    st.integers(min_value=2**31),
    st.floats(max_value=-0.5),
    st.sampled_from([float("nan"), float("inf"), [], {}, [2], {"a": 2}, "", "2", "yes, please"]),
    st.text(min_size=1).filter(lambda text: "\0" not in text),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text("abc", min_size=1), st.integers(), min_size=1, max_size=2),
)


@settings(quick, max_examples=30)
@given(at=st.sampled_from(FIELDS), value=WRONG)
def test_values_of_the_wrong_kind(tmp_path, at, value):
    if at.metadata["kind"].accepts(value):  # a text that is a text, say the path of a model
        value = [value]
    refused(file(tmp_path, nested(at.metadata["key"], value)))


@settings(quick, max_examples=15)
@given(
    section=st.sampled_from(verl_config.SECTIONS + verl_config.ENGINES[:1]),
    key=st.one_of(st.text("abcxyz_", min_size=1), st.integers(), st.booleans()),
    value=st.one_of(st.none(), st.integers(), st.text("abc")),
)
def test_unknown_keys(tmp_path, section, key, value):
    content = nested(f"{section}.placeholder", 0)
    node = content
    for part in section.split("."):
        node = node[part]
    node[key] = node.pop("placeholder")
    node[key] = value
    status, out, err = run("explain", file(tmp_path, content))
    assert (status, LACKS in out + err) == (2, True)


@settings(quick, max_examples=12)
@given(name=st.text(min_size=1, max_size=200), key=st.sampled_from(["loss_agg_mode", "strategy"]))
def test_unknown_names(tmp_path, name, key):
    assert f"{ACTOR}.{key} is " in refused(file(tmp_path, nested(f"{ACTOR}.{key}", f" {name}")))


@settings(quick, max_examples=50)
@given(
    content=st.one_of(st.binary(max_size=300), st.text("{}[]:,-&*!|>'\"%@#?\n aA1", max_size=80))
)
def test_noise(tmp_path, content):
    refused(file(tmp_path, content))


def test_nearest_name_is_offered(tmp_path):
    content = nested(f"{ACTOR}.megatron.context_paralel_size", 2)
    assert "did you mean 'context_parallel_size'" in refused(file(tmp_path, content))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (["trainer.nnodes=1"], "trainer.n_gpus_per_node times trainer.nnodes is 8, allowed is"),
        ([f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2"], "null unless PP is above 1"),
        ([f"{ACTOR}.megatron.dtype=float32"], "allowed is one of bfloat16, float16"),
        ([PER_TOKEN.replace("loss=", "losses=")], "did you mean 'calculate_per_token_loss'"),
        (["trainer.nnodes=6"], "times rollout.n is 256, allowed is a multiple of the 3"),
        ([f"{ACTOR}.policy_loss.loss_mode=dro"], "policy_loss.dro_beta is None"),
        ([f"{ACTOR}.megatron.dynamic_context_parallel=True"], "max_seqlen_per_dp_cp_rank is None"),
        (
            ["trainer.nnodes=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu=7"],
            "is 7, allowed is a divisor",
        ),
        (
            [ONE_BY_ONE, f"{ACTOR}.ppo_micro_batch_size=1"],
            "allowed is null beside ppo_micro_batch_size_per_gpu",
        ),
    ],
)
def test_values_that_do_not_go_together(override, sentence):
    assert sentence in refused(QUESTION, *override)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "has no lengths"),
        ("1 2 3", "line 1"),
        ("1 2\n3", "line 2"),
        ("1 -2", "line 1"),
        ("1 0", "line 1"),
        ("1 2.5", "line 1"),
        ("1 99999999999", "line 1"),
        ("1 ²", "line 1"),
        ("a b", "line 1"),
        ("1 1\n2 2\n3 3", "dp is 2"),
    ],
)
def test_bad_lengths(tmp_path, content, sentence):
    path = tmp_path / "lengths"
    path.write_text(content)
    options = [ONE_BY_ONE, PER_TOKEN, "--lengths", path, "--dp", 2]
    assert sentence in refused(QUESTION, *options)


def test_lengths_are_those_of_a_mini_batch(tmp_path):
    (tmp_path / "lengths").write_text("4 4\n10 3\n")
    options = f"{ACTOR}.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2"
    message = refused(QUESTION, *options, ONE_BY_ONE, "--lengths", tmp_path / "lengths", "--dp", 1)
    assert "lengths of 2 sequences, allowed are those of a mini-batch" in message
    assert message.endswith("ppo_mini_batch_size times rollout.n, 8.\n")


def test_lengths_need_replicas_and_a_micro_batch(tmp_path):
    path = tmp_path / "lengths"
    path.write_text("5 5\n5 5\n")
    lengths = ["--lengths", path]
    assert "give trainer.nnodes or --dp" in refused(QUESTION, *lengths)
    assert "ppo_micro_batch_size_per_gpu" in refused(QUESTION, "trainer.nnodes=2", *lengths)
    assert "dp is 3, allowed is 1" in refused(QUESTION, "trainer.nnodes=2", "--dp", 3)
    assert "not a file" in refused(QUESTION, "--lengths", tmp_path)
