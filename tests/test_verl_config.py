"""A configuration is read as verl's trainer reads it."""

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from cpnorm import installed, launch, verl_config
from cpnorm.settings import Settings
from cpnorm.sources import folder
from cpnorm.user_file import parse_yaml, short

CONFIGS = Path(__file__).parent / "configs"
QUESTION = CONFIGS / "question.yaml"
MEGATRON = CONFIGS / "megatron.yaml"
ACTOR = "actor_rollout_ref.actor"


def settings(*arguments):
    """Those of a command line's arguments."""
    return verl_config.load(launch.read(arguments[0], arguments[1:])).settings


def load(content, tmp_path, *overrides):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    return settings(str(path), *overrides)


def composed():
    """verl's own configuration for Megatron, by Hydra."""
    with initialize_config_dir(str(folder("verl") / "trainer/config"), version_base=None):
        return compose("ppo_megatron_trainer")


def test_the_questions_configuration():
    s = settings(str(QUESTION))
    assert (s.strategy, s.loss, s.mode) == ("megatron", "gspo", "seq-mean-token-mean")
    assert (s.tp, s.pp, s.cp, s.dynamic_cp, s.remove_padding) == (8, 1, 2, False, True)
    assert s.D is None
    assert s.is_given("cp")
    assert not s.is_given("mini_batch")


def test_defaults_are_those_of_verls_generated_file():
    """verl keeps a composed copy of its configuration for Megatron."""
    path = folder("verl") / "trainer/config/_generated_ppo_megatron_trainer.yaml"
    ours = settings(str(MEGATRON))
    generated = settings(str(path))
    for f in dataclasses.fields(ours):
        if f.name != "given":
            assert getattr(ours, f.name) == getattr(generated, f.name), f.name


def test_every_setting_is_a_key_of_verls_configuration():
    """But those that the user adds, or that only the dataclass has."""
    added = {"per_token", "aux_coef", "balancing", "unused_fused", "z_loss", "collective_average"}
    added |= {f.name for f in dataclasses.fields(Settings) if f.name.startswith("own_correction")}
    config = composed()
    for f in dataclasses.fields(Settings):
        if f.metadata and f.name not in added:
            parent, _, key = f.metadata["key"].rpartition(".")
            assert key in OmegaConf.select(config, parent), f.name


def test_part_and_whole_are_read_alike(tmp_path):
    part = "actor: {loss_agg_mode: token-sum, megatron: {context_parallel_size: 4}}"
    whole = f"actor_rollout_ref: {{{part}}}"
    assert load(part, tmp_path) == load(whole, tmp_path)


def test_composed_output_of_verl_is_read(tmp_path):
    """What `--cfg job` prints."""
    text = OmegaConf.to_yaml(composed()).replace(
        "context_parallel_size: 1", "context_parallel_size: 4"
    )
    s = load(text, tmp_path, "trainer.nnodes=2")
    assert (s.cp, s.D) == (4, 4)
    assert s.is_given("mode")


@pytest.mark.parametrize(
    ("content", "strategy"),
    [
        ("actor: {loss_agg_mode: token-mean}", "fsdp"),
        ("actor: {strategy: fsdp2}", "fsdp2"),
        ("actor: {megatron: {context_parallel_size: 2}}", "megatron"),
        ("actor: {strategy: megatron}", "megatron"),
        ("model_engine: megatron\nactor_rollout_ref: {actor: {}}", "megatron"),
        ("defaults: [ppo_megatron_trainer]", "megatron"),
        ("defaults: [ppo_trainer, override model_engine: megatron, _self_]", "megatron"),
        ("defaults: [ppo_trainer]\nactor_rollout_ref: {actor: {}}", "fsdp"),
    ],
)
def test_the_engine_that_a_file_speaks_of(tmp_path, content, strategy):
    assert load(content, tmp_path).strategy == strategy


def test_overrides_are_verls():
    def cp(*overrides):
        return settings(str(MEGATRON), *overrides).cp

    key = f"{ACTOR}.megatron.context_parallel_size"
    assert cp() == 1
    assert cp(f"{key}=4") == 4
    assert cp(f"++{key}=4") == 4
    assert cp(f"{key}=2", f"{key}=8") == 8
    assert cp(f"~{key}") == 1
    assert cp(f"{ACTOR}.megatron={{context_parallel_size:4}}") == 4
    assert cp("trainer.nnodes=3", f"{key}=${{trainer.nnodes}}") == 3


def test_overrides_choose_config_groups():
    def strategy(*overrides):
        return settings(str(QUESTION), *overrides).strategy

    assert strategy() == "megatron"
    assert strategy("model_engine=dp") == "fsdp"
    assert strategy("model_engine=dp", "actor@actor_rollout_ref.actor=megatron_actor") == "megatron"


def test_overrides_say_what_is_given():
    s = settings(str(QUESTION), "trainer={nnodes:2,n_gpus_per_node:8}")
    assert s.is_given("nodes")
    assert s.D == 1


def test_an_interpolation_that_resolves(tmp_path):
    content = (
        "trainer: {nnodes: 4}\nactor_rollout_ref: {actor: {megatron: {CP: '${trainer.nnodes}'}}}"
    )
    assert load(content.replace("CP", "context_parallel_size"), tmp_path).cp == 4


def test_keys_of_the_dataclasses_are_known(tmp_path):
    """`use_fused_kernels` is a field of `EngineConfig` and no key of megatron.yaml."""
    assert "use_fused_kernels" in installed.declared("verl.workers.config.McoreEngineConfig")
    assert load("actor: {megatron: {use_fused_kernels: true}}", tmp_path).unused_fused


def test_numbers_are_read_as_hydra_reads_them(tmp_path):
    """YAML 1.1 takes 3e-4 for a text."""
    assert load("actor: {clip_ratio_low: 3e-4, megatron: {}}", tmp_path).clip_low == 3e-4


def test_what_is_refused_changes_nothing_else():
    """Where Hydra refuses an override, the others are applied as Hydra applies them."""
    overrides = (
        f"{ACTOR}.loss_agg_mode=token-sum",
        f"+{ACTOR}.megatron.override_transformer_config.calculate_per_token_loss=True",
        f"++{ACTOR}.megatron.override_ddp_config.x={{a:[1,2]}}",
        f"~{ACTOR}.megatron.vanilla_mbridge",
        f"{ACTOR}.megatron.context_parallel_size=${{trainer.nnodes}}",
        f"{ACTOR}.policy_loss={{loss_mode:gspo}}",
        "trainer={nnodes:4}",
    )
    first, *rest = str(MEGATRON), *overrides
    plain = verl_config.load(launch.read(first, rest))
    found = verl_config.load(launch.read(first, [f"{ACTOR}.megatron.grad_offload=1", *rest]))
    (key, *_) = set(found.refused) - set(plain.refused)
    assert "grad_offload" in key
    given = found.settings.given
    assert dataclasses.replace(found, refused=plain.refused) == dataclasses.replace(
        plain, settings=dataclasses.replace(plain.settings, given=given)
    )


def test_short_is_short():
    assert short("a") == "'a'"
    assert len(short("x" * 10**6)) == 80
    assert "\n" not in short("a\nb")


def test_yaml_keeps_interpolations():
    assert parse_yaml("a: ${b}\nb: 1", "a") == {"a": "${b}", "b": 1}
