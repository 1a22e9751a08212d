"""The verdict on configurations, those of verl's own Megatron example scripts among them."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from cpnorm import explain, installed, launch
from cpnorm.case import Sequence, losses
from cpnorm.count import ratio
from cpnorm.micro_batches import tokens
from cpnorm.verl_config import load

CONFIGS = Path(__file__).parent / "configs"
A, M = "actor_rollout_ref.actor", "actor_rollout_ref.actor.megatron"
MODEL, OVERRIDE = "actor_rollout_ref.model", f"+{M}.override_transformer_config"
PER_TOKEN = f"{OVERRIDE}.calculate_per_token_loss=True"
CP, TP, PP, EP = (
    f"{M}.{name}_parallel_size"
    for name in ("context", "tensor_model", "pipeline_model", "expert_model")
)
QWEN3, QWEN35 = (f"{MODEL}.path={CONFIGS / name}" for name in ("qwen3", "qwen3_5"))
V090 = installed.Engine(counts=True, guard=True, refuses_bshd=True)
V080 = installed.Engine(counts=False, guard=False, refuses_bshd=False)


BOTH = ["per-token", "averaging"]


def read(*overrides, config="question"):
    return launch.read(str(CONFIGS / f"{config}.yaml"), overrides)


def verdict(*overrides, config="question", **options):
    return explain.judged(read(*overrides, config=config), **options)


def texts(verdict, status=None):
    """The findings' texts, those of one status if given."""
    found = [f for o in verdict.outcomes for f in o.findings]
    return " | ".join(f.text for f in found if status in (None, f.status))


def batch(train, mini, prompt, response, n):
    """Keys that all of the scripts set."""
    return (
        f"data.train_batch_size={train}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        f"{A}.ppo_mini_batch_size={mini}",
        f"actor_rollout_ref.rollout.n={n}",
    )


def by_tokens(most):
    return f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu={most}"


def gpus(per_node, nodes=1):
    return f"trainer.n_gpus_per_node={per_node}", f"trainer.nnodes={nodes}"


THD, BSHD = f"{MODEL}.use_remove_padding=True", f"{MODEL}.use_remove_padding=False"
DENSE, MOE = f"{MODEL}.path=Qwen/Qwen3-8B", f"{MODEL}.path=Qwen/Qwen3-30B-A3B-Base"
VL = (f"{MODEL}.path=models/Qwen3-VL-30B-A3B-Instruct", f"{CP}=2", f"{TP}=2", f"{PP}=1")
VL += (f"{OVERRIDE}.moe_aux_loss_coeff=0.01", *batch(512, 128, 1024, 2048, 5), *by_tokens(4096))
NPU = (BSHD, f"{M}.use_remove_padding=False", f"{CP}=4", f"{TP}=2", *batch(16, 16, 4096, 32768, 5))
NPU += (f"{A}.use_dynamic_bsz=False", f"{A}.ppo_micro_batch_size_per_gpu=1")

# Script of verl's examples folder, the keys it sets (without those that later releases than
# 0.9.1 know, such as megatron.grad_offload), the verdict, and words of a finding that decides.
EXAMPLES = {
    "gpg_trainer/run_qwen3_8b_megatron.sh": (
        (DENSE, THD, f"{A}.policy_loss.loss_mode=gpg", f"{TP}=2", f"{PP}=2", *gpus(8)),
        (*batch(1024, 256, 1024, 2048, 5), *by_tokens(24576)),
        "safe",
        "averages over micro-batches",
    ),
    "gdpo_trainer/run_qwen2_5_1_5b_megatron.sh": (
        (f"{MODEL}.path=Qwen/Qwen2.5-1.5B-Instruct", THD, f"{TP}=2", f"{PP}=1", *gpus(4)),
        (f"{A}.loss_agg_mode=token-mean", *batch(16, 8, 2048, 1024, 4), *by_tokens(6144)),
        "safe",
        "averages over micro-batches",
    ),
    "gspo_trainer/run_qwen3_30b_a3b_megatron.sh": (
        (MOE, THD, f"{A}.policy_loss.loss_mode=gspo", f"{A}.loss_agg_mode=seq-mean-token-mean"),
        (f"{TP}=2", f"{EP}=8", *gpus(8), *batch(256, 32, 2048, 8192, 16), *by_tokens(30720)),
        "not covered",
        "EP 8",
    ),
    "sapo_trainer/run_qwen3_30b_a3b_megatron.sh": (
        (MOE, THD, f"{A}.policy_loss.loss_mode=sapo", f"{TP}=4", f"{EP}=4", *gpus(8)),
        (*batch(32, 32, 2048, 8192, 8), f"{A}.ppo_micro_batch_size_per_gpu=1"),
        "not safe",
        "sapo aggregates with seq-mean-token-mean whatever loss_agg_mode says",
    ),
    "gmpo_trainer/run_qwen2_5_7b_megatron.sh": (
        (f"{MODEL}.path=Qwen/Qwen2.5-7B", THD, f"{A}.policy_loss.loss_mode=geo_mean", *gpus(4)),
        (f"{TP}=4", *batch(256, 128, 512, 1024, 2), *by_tokens(1536)),
        "not safe",
        "geo_mean ends in a mean over the micro-batch",
    ),
    "dppo_trainer/run_qwen3_30b_a3b_megatron.sh": (
        (MOE, THD, f"{A}.policy_loss.loss_mode=dppo_tv", f"{TP}=2", f"{EP}=8", *gpus(8)),
        (
            *by_tokens(30720),
            f"{A}.loss_agg_mode=seq-mean-token-sum-norm",
            *batch(256, 32, 2048, 8192, 16),
        ),
        "not safe",
        "without loss_scale_factor",
    ),
    "grpo_trainer/run_qwen3_vl_30b_a3b_megatron.sh": (
        (*VL, f"{EP}=8", *gpus(8)),
        (),
        "not covered",
        "EP 8",
    ),
    "grpo_trainer/run_qwen3_vl_30b_a3b_megatron.sh EP=1": (
        (*VL, f"{EP}=1", *gpus(8)),
        (),
        "safe",
        "multiply the gradient by T/K",
    ),
    "grpo_trainer/run_qwen3_5_35b_megatron.sh": (
        (f"{MODEL}.path=Qwen3.5-35B-A3B", BSHD, f"{CP}=1", f"{TP}=2", f"{EP}=8", *gpus(8)),
        (*batch(32, 32, 1024, 2048, 5), f"{A}.ppo_micro_batch_size_per_gpu=1"),
        "not covered",
        "BSHD",
    ),
    "ascend_extras/grpo_trainer/run_qwen3_5_35b_megatron_4k_32k.sh": (
        (f"{MODEL}.path=models/Qwen3.5-35B-A3B", *NPU, f"{PP}=2", f"{EP}=8", *gpus(16)),
        (f"{M}.vanilla_mbridge=False",),
        "not safe",
        "calculate_per_token_loss needs use_remove_padding",
    ),
    "ascend_extras/grpo_trainer/run_qwen3_5_122b_a10b_32k_megatron.sh": (
        (f"{MODEL}.path=models/Qwen3.5-122B-A10B", *NPU, f"{PP}=4", f"{EP}=16", *gpus(16, 4)),
        (),
        "not safe",
        "calculate_per_token_loss needs use_remove_padding",
    ),
    "grpo_trainer/run_qwen2_5_vl_7b_megatron.sh": (
        (f"{MODEL}.path=Qwen/Qwen2.5-VL-7B-Instruct", THD, f"{MODEL}.use_fused_kernels=True"),
        (f"{TP}=2", f"{PP}=2", *gpus(8), *batch(512, 128, 1024, 2048, 5), *by_tokens(24576)),
        "not covered",
        "fused kernels",
    ),
    "grpo_trainer/run_nemotron_nano_v3_30b_a3b_megatron.sh": (
        (f"{MODEL}.path=models/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", f"{TP}=8", f"{EP}=8"),
        (*gpus(8), *batch(32, 32, 2048, 2048, 16), *by_tokens(4096)),
        "not covered",
        "EP 8",
    ),
    "grpo_trainer/run_qwen2-7b_math_megatron_fsdp.sh": (
        (f"{MODEL}.path=Qwen/Qwen2-7B-Instruct", f"{TP}=4", f"{M}.use_megatron_fsdp=True"),
        (*gpus(8), *batch(32, 16, 512, 512, 2), f"{A}.ppo_micro_batch_size_per_gpu=2"),
        "not covered",
        "Megatron-FSDP",
    ),
}


@pytest.mark.parametrize("script", EXAMPLES)
def test_example_scripts_of_verl(script):
    some, more, status, words = EXAMPLES[script]
    result = verdict(*some, *more, config="megatron")
    assert result.status == status
    assert words in texts(result, status)
    assert result.exit_status == (status != "safe")


def test_loss_of_a_later_release():
    """cppo_trainer/run_qwen3_1.7b_megatron.sh: verl 0.9.1 does not know the loss."""
    with pytest.raises(ValueError, match="loss_mode is 'cppo', allowed is one of vanilla"):
        verdict(f"{A}.policy_loss.loss_mode=cppo", config="megatron")


# Regimes


@pytest.mark.parametrize(
    ("overrides", "regimes", "why"),
    [
        ((), ["per-token", "averaging"], "it depends on the model"),
        ((QWEN35,), ["per-token"], "Qwen3_5ForConditionalGeneration in the model's config.json"),
        ((QWEN3,), ["averaging"], "leaves calculate_per_token_loss off at CP 2: Qwen3ForCausalLM"),
        ((f"{MODEL}.path=Qwen/Qwen3-VL-8B",), BOTH, "by its name per-token is likely"),
        ((f"{MODEL}.path=Qwen/Qwen3.6-27B",), BOTH, "by its name averaging is likely"),
        ((f"{MODEL}.path=/ckpt/step_400",), BOTH, "no config.json at /ckpt/step_400 says"),
        ((f"{MODEL}.path=/hub/models--Qwen--Qwen3.5-9B/snapshots/abc",), BOTH, "per-token is"),
        ((QWEN35, f"{CP}=1"), ["averaging"], "at CP 1"),
        ((PER_TOKEN, f"{CP}=1"), ["per-token"], "override_transformer_config"),
        ((PER_TOKEN, QWEN3), ["per-token"], "override_transformer_config"),
        ((QWEN35, f"{M}.vanilla_mbridge=True"), ["averaging"], "mbridge"),
        (
            (f"{M}.dynamic_context_parallel=True", f"{M}.max_seqlen_per_dp_cp_rank=4096"),
            ["per-token"],
            "dynamic CP",
        ),
    ],
)
def test_regime(overrides, regimes, why):
    result = verdict(*overrides)
    assert [o.regime for o in result.outcomes] == regimes
    assert why in result.why


@pytest.mark.parametrize(
    ("architecture", "regime"),
    [
        ("Qwen3_5ForConditionalGeneration", "per-token"),
        ("Qwen3VLMoeForConditionalGeneration", "per-token"),
        ("Qwen3_5ForCausalLM", "averaging"),
        ("Qwen3ForCausalLM", "averaging"),
    ],
)
def test_regime_from_the_models_own_file(tmp_path, architecture, regime):
    """The folder's name says nothing."""
    folder = tmp_path / "Qwen3.5-9B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    result = verdict(f"{MODEL}.path={folder}")
    assert [o.regime for o in result.outcomes] == [regime]
    assert f"{architecture} in the model's config.json" in result.why


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"architectures": 5}', "\x00"])
def test_a_models_file_that_says_nothing(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    result = verdict(f"{MODEL}.path={tmp_path}")
    assert [o.regime for o in result.outcomes] == BOTH
    assert f"no config.json at {tmp_path} says which model it is" in result.why


def test_the_configuration_of_the_model_may_lie_elsewhere():
    path = f"{MODEL}.hf_config_path={CONFIGS / 'qwen3_5'}"
    assert verdict(f"{MODEL}.path=/ckpt/step_400", path).outcomes[0].regime == "per-token"


def test_override_to_false_does_not_help():
    result = verdict(QWEN35, PER_TOKEN.replace("True", "False"))
    assert [o.regime for o in result.outcomes] == ["per-token"]
    assert "to no effect" in texts(result)


# Releases


def test_what_the_installed_release_does():
    versions = installed.versions()
    assert versions["verl"] == "0.9.1"
    assert installed.engine() == installed.Engine(counts=True, guard=False, refuses_bshd=True)
    modes = {loss: installed.aggregated(loss, "mine") for loss in losses()}
    own = {"sapo": "seq-mean-token-mean", "geo_mean": None}
    assert modes == {loss: own.get(loss, "mine") for loss in losses()}
    assert installed.versions().keys() == {"verl", "megatron-core", "megatron-bridge"}


def release(monkeypatch, version, engine):
    """What an examined release's verdict says, with the sources of the installed one."""
    versions = {**installed.versions(), "verl": version}
    monkeypatch.setattr(installed, "versions", lambda: versions)
    monkeypatch.setattr(installed, "differences", lambda loss: ())
    monkeypatch.setattr(installed, "engine", lambda: engine)


def test_the_guard_of_0_9_0(monkeypatch):
    release(monkeypatch, "0.9.0", V090)
    result = verdict(QWEN35)
    assert (result.status, result.outcomes[0].runs) == ("not safe", False)
    assert "its guard refuses seq-mean-token-mean" in texts(result, "not safe")
    assert verdict(QWEN35, f"{A}.loss_agg_mode=token-mean").outcomes[0].runs
    assert not verdict(PER_TOKEN, f"{CP}=1").outcomes[0].runs
    assert verdict(f"{CP}=1").outcomes[0].runs


def test_two_values_of_0_8_0(monkeypatch):
    release(monkeypatch, "0.8.0", V080)
    result = verdict(QWEN35, "trainer.nnodes=4")
    assert result.status == "not safe"
    assert "the gradient is 4 times as large" in texts(result, "not safe")
    assert "D times 2" in texts(verdict(QWEN35), "not safe")
    assert verdict(QWEN3).status == "safe"


def test_gspo_of_0_9_0_takes_no_notice_of_the_mode(monkeypatch):
    release(monkeypatch, "0.9.0", V090)
    monkeypatch.setattr(installed, "aggregated", lambda loss, mode: "seq-mean-token-mean")
    result = verdict(f"{A}.loss_agg_mode=token-mean")
    assert "gspo aggregates with seq-mean-token-mean" in texts(result, "not safe")


def test_gspo_of_0_9_1_aggregates_as_it_is_told():
    result = verdict(QWEN35, f"{A}.loss_agg_mode=token-mean")
    assert result.status == "safe"
    assert "GSPO's paper aggregates with seq-mean-token-mean, here it is token-mean" in texts(
        result
    )


CORRECTION = "algorithm.rollout_correction"
OLDER = "trainer.use_v1=false"


@pytest.mark.parametrize(
    ("overrides", "status", "text"),
    [
        ([f"{CORRECTION}.bypass_mode=true"], "safe", "does not change the loss"),
        ([f"{CORRECTION}.bypass_mode=true", OLDER], "not covered", "writes bypass_mode over"),
        (
            [
                f"{A}.policy_loss.loss_mode=bypass_mode",
                f"{CORRECTION}.bypass_mode=true",
                f"{CORRECTION}.loss_type=reinforce",
                f"{CORRECTION}.rollout_is=sequence",
                f"{CORRECTION}.rollout_is_batch_normalize=true",
            ],
            "safe",
            "does not change the loss",
        ),
        (
            [
                f"{A}.policy_loss.loss_mode=bypass_mode",
                f"+{A}.policy_loss.rollout_correction.loss_type=reinforce",
                f"+{A}.policy_loss.rollout_correction.rollout_is=sequence",
                f"+{A}.policy_loss.rollout_correction.rollout_is_batch_normalize=true",
            ],
            "not safe",
            "the loss depends on the split",
        ),
        (
            [
                f"{A}.policy_loss.loss_mode=bypass_mode",
                f"{CORRECTION}.bypass_mode=true",
                f"{CORRECTION}.rollout_is=sequence",
                f"{CORRECTION}.rollout_is_batch_normalize=true",
            ],
            "safe",
            None,
        ),
        ([f"{A}.policy_loss.loss_mode=bypass_mode"], "safe", None),
        ([f"{A}.megatron.use_mbridge=false"], "not safe", "needs use_mbridge"),
        (
            [f"+{A}.megatron.override_ddp_config.average_in_collective=true"],
            "not safe",
            "average_in_collective excludes",
        ),
        (
            [
                f"{TP}=1",
                f"{PP}=2",
                f"{A}.megatron.virtual_pipeline_model_parallel_size=2",
                f"{A}.ppo_mini_batch_size=3",
                f"{A}.ppo_micro_batch_size_per_gpu=1",
                "trainer.n_gpus_per_node=4",
            ],
            "not safe",
            "in groups of PP 2, not 3",
        ),
        (
            [f"+{A}.megatron.override_transformer_config.moe_z_loss_coeff=0.001"],
            "not covered",
            "z-loss",
        ),
        (
            [f"{A}.megatron.expert_tensor_parallel_size=2"],
            "not covered",
            "expert tensor parallelism 2",
        ),
    ],
)
def test_what_changes_the_loss_or_stops_the_run(overrides, status, text):
    result = verdict(QWEN35, *overrides)
    assert result.status == status
    if text:
        assert text in texts(result, status)


# Objectives


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov", "geo_mean"])
def test_losses_without_one_objective(loss):
    assert verdict(QWEN35, f"{A}.policy_loss.loss_mode={loss}").status == "not safe"


def test_divisor_left_to_verl():
    norm = f"{A}.loss_agg_mode=seq-mean-token-sum-norm"
    assert verdict(QWEN35, norm).status == "not safe"
    assert verdict(QWEN35, norm, f"{A}.loss_scale_factor=4096").status == "safe"


def test_sapo_with_its_own_mode_is_safe():
    assert verdict(QWEN35, f"{A}.policy_loss.loss_mode=sapo").status == "safe"


# Paths


def test_the_models_switches_win():
    """verl 0.9.1's `TrainingWorker` overwrites the engine's with the model's."""
    result = verdict(QWEN35, f"{M}.use_remove_padding=False")
    assert result.path["layout"] == "THD"
    assert "is overwritten by actor_rollout_ref.model.use_remove_padding" in texts(result)
    result = verdict(QWEN35, BSHD)
    assert result.path["layout"] == "BSHD"
    assert result.status == "not safe"
    assert "use_fused_kernels, which is True" in texts(verdict(f"{MODEL}.use_fused_kernels=True"))


def test_dynamic_cp(monkeypatch):
    """The book leaves it open; no release of Megatron-Core has the groups that it needs."""
    dynamic = f"{M}.dynamic_context_parallel=True", f"{M}.max_seqlen_per_dp_cp_rank=4096"
    result = verdict(QWEN35, *dynamic)
    assert result.status == "not safe"
    assert "has no dynamic_context_parallel" in texts(result)
    monkeypatch.setattr(installed, "has_dynamic_groups", lambda: True)
    result = verdict(QWEN35, *dynamic)
    assert result.status == "not covered"
    findings = [f for o in result.outcomes for f in o.findings]
    assert [f.statements for f in findings if "dynamic CP" in f.text] == [("dynamic-engine",)]
    assert verdict(QWEN35, *dynamic, f"{M}.pad_to_length=True").status == "not safe"
    assert verdict(QWEN35, *dynamic, BSHD).status == "not safe"
    odd = f"{CP}=3", "trainer.nnodes=3"
    assert "an even number" in texts(verdict(QWEN35, *dynamic, *odd))


def test_auxiliary_loss():
    key = f"{OVERRIDE}.moe_router_load_balancing_type"
    assert verdict(QWEN35, f"{key}=aux_loss").status == "not covered"
    assert verdict(QWEN35, f"{key}=none").status == "safe"


def test_float16():
    assert "float16's loss scale" in texts(verdict(QWEN35, f"{M}.dtype=float16"))


def test_other_engines():
    result = verdict("model_engine=dp")
    assert result.status == "not covered"
    assert "fsdp" in texts(result)


def test_sizes_beyond_the_runs_are_told():
    assert "end below TP 8" in texts(verdict(QWEN35))
    assert "end below" not in texts(verdict(QWEN35, f"{TP}=2"))


def test_statements_are_in_the_register():
    register = explain._register()
    result = verdict()
    assert {"objective", "cancellation", "topologies", "token-count"} <= set(result.statements)
    for label, (title, status) in result.statements.items():
        assert (title, status) == (register[label]["title"], register[label]["status"])


# T/K


def bounds(*overrides):
    return dict(verdict(PER_TOKEN, *overrides).outcomes[0].ratio.bounds)


def test_bounds_hold_for_every_count_and_are_reached():
    for C in (2, 3, 8):
        found = bounds(f"{CP}={C}", f"{A}.ppo_micro_batch_size_per_gpu=4")
        for t, bound in found.items():
            counts = [ratio(((n,),), C) for n in range(t, t + 3 * C)]
            assert max(counts) == bound
            assert min(counts) >= 1


def test_bounds_follow_the_batch_settings():
    static = bounds(f"{A}.ppo_micro_batch_size_per_gpu=4")
    assert min(static) == 8
    lengths = "data.max_prompt_length=512", "data.max_response_length=512"
    assert max(bounds(f"{A}.ppo_micro_batch_size_per_gpu=4", *lengths)) == 4 * 1024
    dynamic = bounds(*by_tokens(20480), f"{CP}=4")
    assert (min(dynamic), max(dynamic)) == (2, 4 * 20480)
    assert dynamic[2] is None
    assert dynamic[128] == 1 + Fraction(3, 128)


def test_with_cp_1_the_count_is_exact():
    result = verdict(PER_TOKEN, f"{CP}=1")
    assert set(dict(result.outcomes[0].ratio.bounds).values()) == {1}


LENGTHS = tuple(Sequence(*pair) for pair in ((4, 4), (10, 3), (20, 7), (4, 5)))


def test_exact_ratio_of_given_lengths():
    """8, 13, 27 and 9 tokens at CP 8: 57/48."""
    options = PER_TOKEN, f"{CP}=8", f"{A}.ppo_micro_batch_size_per_gpu=1"
    result = verdict(*options, lengths=LENGTHS, dp=1)
    assert result.outcomes[0].ratio.exact == (57, 48, Fraction(57, 48))
    assert result.status == "safe"


def test_no_token_counted():
    options = PER_TOKEN, f"{CP}=8", f"{A}.ppo_micro_batch_size_per_gpu=1"
    result = verdict(*options, lengths=(Sequence(1, 1),) * 4, dp=1)
    assert result.outcomes[0].ratio.exact == (8, 0, 8)
    assert "K is 0, and the gradient is 8 times as large" in texts(result, "not safe")


def test_static_micro_batches():
    settings = load(read(f"{A}.ppo_micro_batch_size_per_gpu=2")).settings
    assert tokens(settings, 1, LENGTHS) == ((21, 36),)
    assert tokens(settings, 2, LENGTHS) == ((21,), (36,))


def test_dynamic_micro_batches_are_verls():
    """No micro-batch over the limit, no token lost, and as many for every replica."""
    settings = load(read(*by_tokens(20))).settings
    lengths = tuple(Sequence(1 + i, 1 + 7 * i % 13) for i in range(16))
    for D in (1, 2, 4):
        t = tokens(settings, D, lengths)
        assert len({len(parts) for parts in t}) == 1
        assert max(map(max, t)) <= 40
        size = 16 // D
        blocks = [lengths[d * size : (d + 1) * size] for d in range(D)]
        assert [sum(parts) for parts in t] == [sum(s.length for s in block) for block in blocks]
        needed = [-(-sum(parts) // 40) for parts in t]
        assert D == 1 or min(needed) < max(needed) <= len(t[0])
    with pytest.raises(ValueError, match="verl does not split these lengths"):
        tokens(settings, 1, (Sequence(20, 21),))
