"""`cpnorm check`: what it makes of a configuration, and the question's own topology as it runs."""

import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpnorm import own_run
from cpnorm.cli import main
from cpnorm.engine import check_fit
from cpnorm.engine.sweep import Job
from cpnorm.explain import explain
from cpnorm.launch import read
from cpnorm.ranks import RankError
from cpnorm.settings import Settings
from cpnorm.verl_config import load

BOTH = ["per-token", "averaging"]
SMALL = Settings(cp=2, loss="gspo", mode="seq-mean-token-mean")


@given(
    st.sampled_from((1, 2, 3, 8)),
    st.sampled_from((1, 2, 3, 8)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((None, 2)),
    st.sampled_from((None, 1, 2, 16)),
    st.booleans(),
)
def test_every_topology_of_few_ranks_has_a_plan_that_fits(cp, tp, pp, vpp, micro, dynamic):
    settings = Settings(cp=cp, tp=tp, pp=pp, vpp=vpp, micro_batch=micro, dynamic_batch=dynamic)
    if cp * tp * pp > own_run.MOST_RANKS:
        with pytest.raises(ValueError, match="allowed on one machine is 32: start"):
            own_run.plan(settings, BOTH)
        return
    jobs = own_run.plan(settings, BOTH)
    assert [job.case.regime for job in jobs] == BOTH
    for job in jobs:
        assert (job.case.cp, job.case.tp, job.case.pp) == (cp, tp, pp)
        assert job.exact
        check_fit(job.case, job.model)


def test_replicas_above_two_are_two():
    many = replace(SMALL, nodes=4, given=frozenset({"trainer.nnodes"}))
    assert many.D == 16
    assert own_run.plan(many, BOTH)[0].case.dp == 2


def test_ranks_that_are_there_already_are_all_used():
    assert own_run.plan(SMALL, BOTH, ranks=8)[0].case.dp == 4
    with pytest.raises(ValueError, match="7 ranks were started, allowed is a multiple of 2"):
        own_run.plan(SMALL, BOTH, ranks=7)


def test_a_clip_bound_of_zero_is_kept():
    case = own_run.plan(replace(SMALL, clip_low=0.0, clip_high=None), BOTH)[0].case
    assert (case.clip_low, case.clip_high) == (0.0, 0.2)


def test_on_cuda_bfloat16_runs_besides_and_is_not_judged():
    jobs = own_run.plan(SMALL, BOTH, device="cuda")
    assert [(job.case.dtype, job.exact) for job in jobs] == [("float64", True)] * 2 + [
        ("bfloat16", False)
    ] * 2


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"strategy": "fsdp"}, "strategy fsdp"),
        ({"dynamic_cp": True, "max_seqlen": 8}, "dynamic context parallelism"),
        ({"remove_padding": False}, "the BSHD layout"),
        ({"fused": True}, "fused kernels"),
        ({"pad_to_length": True}, "pad_to_length"),
        ({"megatron_fsdp": True}, "Megatron-FSDP"),
        ({"ep": 2}, "expert parallelism .EP 2."),
        ({"distillation": True}, "another loss beside the policy loss"),
        ({"mtp": True}, "another loss beside the policy loss"),
        ({"bypass": True, "use_v1": False}, "rollout_correction.bypass_mode"),
    ],
)
def test_what_is_not_run_is_refused(changes, what):
    with pytest.raises(ValueError, match=f"cpnorm check does not run {what}"):
        own_run.plan(replace(SMALL, **changes), BOTH)


@pytest.fixture(scope="module")
def results():
    said = []
    jobs = own_run.plan(SMALL, BOTH)
    jobs.append(Job(replace(jobs[0].case, loss="geo_mean"), jobs[0].model, exact=True))
    return own_run.run(jobs, "cpu", said.append), said


def test_both_regimes_agree_with_the_reference(results):
    found, said = results
    assert all(one.agrees for one in found)
    assert [one.reference for one in found] == ["plain torch"] * 2 + [
        "the engine without CP, TP, PP"
    ]
    assert found[0].predicted > found[1].predicted == 1
    assert said[:2] == ["references, without parallelism", "2 ranks start"]


def test_a_wrong_gradient_or_scale_does_not_agree(results):
    one = results[0][0]
    assert not replace(one, ratio=one.ratio * (1 + 1e-9)).agrees
    assert not replace(one, by_name=one.by_name | {"output_layer.weight": 1e-9}).agrees


def test_the_report_names_each_parameter_and_the_verdict(results, capsys):
    verdict = explain(load(read(*own_run.DEFAULT)))
    own_run.show(results[0][:1], "cpu", verdict)
    said = capsys.readouterr().out
    assert all(name in said for name in results[0][0].by_name)
    assert "attention of cpnorm" in said
    assert "\nagrees: " in said
    own_run.show([replace(results[0][0], ratio=2.0)], "cpu", verdict)
    assert "DISAGREES" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "status", "left_out", "last"),
    [
        ("", 0, "", "agrees"),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
            1,
            "",
            "what was run agrees with its reference, but the run is not safe, as said above",
        ),
        (
            "actor_rollout_ref.model.lora_rank=8",
            1,
            " and leaves out: model.lora_rank",
            "what was run agrees with its reference, but the run is not covered, as said above",
        ),
        (
            "actor_rollout_ref.actor.megatron.grad_offload=False",
            2,
            "",
            "what was run agrees with its reference, but verl itself refuses the run, as said "
            "above",
        ),
    ],
)
def test_check_and_explain_never_contradict_each_other(
    results, override, status, left_out, last, monkeypatch, capsys
):
    """Its findings come first, its exit status stays, "agrees" stands alone only if it is safe."""
    monkeypatch.setattr(own_run, "run", lambda *_: results[0][:1])
    first, words = own_run.DEFAULT
    arguments = [first, *words, *([override] if override else [])]
    assert main(["check", *arguments]) == status
    checked = capsys.readouterr().out
    assert main(["explain", *arguments]) == status
    explained = capsys.readouterr().out
    findings = [line for line in explained.splitlines() if line[:3] in ("+  ", "?  ", "-  ")]
    assert findings
    assert all(line in checked.splitlines() for line in findings)
    assert f"\nThe run of cpnorm check has a tiny dense model{left_out}\n" in checked
    assert checked.replace("\n", " ").count(f" {last}: T/K") == 1


CONFIG = """\
actor_rollout_ref:
  actor:
    policy_loss: {loss_mode: gspo}
    loss_agg_mode: seq-mean-token-mean
    megatron: {context_parallel_size: 2}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_the_command_runs_a_configuration(config, capsys):
    assert main(["check", config]) == 0
    said = capsys.readouterr()
    assert "DP 1 x CP 2 x TP 1 x PP 1, gspo seq-mean-token-mean" in said.out
    assert said.out.count("T/K predicted") == 2
    assert said.err == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "tpu"], "device is 'tpu', allowed is cpu or cuda"),
        (["--device", "cuda"], 'device "cuda": torch sees no GPU'),
        (["no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_what_the_command_cannot_use_is_one_sentence(argv, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check", *argv]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.startswith("cpnorm: ")
    assert said.err.count("\n") == 1


def test_a_rank_that_fails_is_told_with_its_traceback(config, monkeypatch, capsys):
    error = RankError(1, "a case", "raised ValueError", "the stack")
    monkeypatch.setattr(own_run, "run", mock.Mock(side_effect=error))
    assert main(["check", config]) == 1
    assert "rank 1 raised ValueError, in a case\nthe stack" in capsys.readouterr().err


def test_under_torchrun_its_ranks_are_used(config):
    """Only the first rank prints."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-W", "ignore", *torchrun, "-m", "cpnorm", "check", config]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("agrees: T/K and every parameter") == 1
