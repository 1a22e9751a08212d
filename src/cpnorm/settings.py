"""What a verdict needs of a verl configuration: names, kinds and ranges of the values."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cpnorm.case import losses, modes
from cpnorm.user_file import short

STRATEGIES = ("megatron", "fsdp", "fsdp2", "fsdp_turbo", "veomni", "torchtitan", "automodel")
"""Backends that verl 0.9.1's `EngineRegistry` knows."""

ROOT = "actor_rollout_ref"
PER_TOKEN = "calculate_per_token_loss"


class Kind(NamedTuple):
    """What a value must be, as a test and in words."""

    accepts: Callable[[Any], bool]
    allowed: str


def _none_or(kind):
    return Kind(lambda v: v is None or kind.accepts(v), f"null or {kind.allowed}")


SWITCH = Kind(lambda v: type(v) is bool, "true or false")
COUNT = Kind(lambda v: type(v) is int and 0 <= v < 2**31, "an integer of at least 0")
WHOLE = Kind(lambda v: type(v) is int and 1 <= v < 2**31, "an integer of at least 1")
NUMBER = Kind(
    lambda v: type(v) in (int, float) and math.isfinite(v) and v >= 0,
    "a finite number of at least 0",
)
REAL = Kind(lambda v: type(v) in (int, float) and math.isfinite(v), "a finite number")
TEXT = Kind(lambda v: type(v) is str and v != "", "a text")
TEXTS = Kind(
    lambda v: TEXT.accepts(v) or (isinstance(v, list) and all(map(TEXT.accepts, v)) and v != []),
    "a text or a list of texts",
)


def _at(key, kind, default):
    """A field that the configuration holds at `key`; `default` where verl's YAML lacks it."""
    return field(default=default, metadata={"key": key, "kind": kind})


_ACTOR, _MEGATRON = f"{ROOT}.actor", f"{ROOT}.actor.megatron"
_CORRECTION = "algorithm.rollout_correction"
_OWN_CORRECTION = f"{ROOT}.actor.policy_loss.rollout_correction"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the verdict needs of a configuration, checked.

    `module` is the trainer's, `given` has the dotted names of all that the file and the overrides
    set, verl's defaults left out, `unknown` those of them whose values are not known.
    """

    strategy: str = _at(f"{_ACTOR}.strategy", TEXT, "megatron")
    loss: str = _at(f"{_ACTOR}.policy_loss.loss_mode", TEXT, "vanilla")
    mode: str = _at(f"{_ACTOR}.loss_agg_mode", TEXT, "token-mean")
    loss_scale_factor: float | None = _at(f"{_ACTOR}.loss_scale_factor", _none_or(WHOLE), None)
    dro_beta: float | None = _at(f"{_ACTOR}.policy_loss.dro_beta", _none_or(NUMBER), None)
    mini_batch: int = _at(f"{_ACTOR}.ppo_mini_batch_size", WHOLE, 256)
    micro_batch: int | None = _at(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", _none_or(WHOLE), None)
    all_micro_batch: int | None = _at(f"{_ACTOR}.ppo_micro_batch_size", _none_or(WHOLE), None)
    dynamic_batch: bool = _at(f"{_ACTOR}.use_dynamic_bsz", SWITCH, False)
    max_token_len: int = _at(f"{_ACTOR}.ppo_max_token_len_per_gpu", WHOLE, 16384)
    clip_low: float | None = _at(f"{_ACTOR}.clip_ratio_low", _none_or(NUMBER), 0.2)
    clip_high: float | None = _at(f"{_ACTOR}.clip_ratio_high", _none_or(NUMBER), 0.2)
    entropy_coef: float = _at(f"{_ACTOR}.entropy_coeff", REAL, 0)
    use_kl_loss: bool = _at(f"{_ACTOR}.use_kl_loss", SWITCH, False)
    kl_coef: float = _at(f"{_ACTOR}.kl_loss_coef", REAL, 0.001)
    tp: int = _at(f"{_MEGATRON}.tensor_model_parallel_size", WHOLE, 1)
    pp: int = _at(f"{_MEGATRON}.pipeline_model_parallel_size", WHOLE, 1)
    vpp: int | None = _at(
        f"{_MEGATRON}.virtual_pipeline_model_parallel_size", _none_or(WHOLE), None
    )
    cp: int = _at(f"{_MEGATRON}.context_parallel_size", WHOLE, 1)
    ep: int = _at(f"{_MEGATRON}.expert_model_parallel_size", WHOLE, 1)
    etp: int | None = _at(f"{_MEGATRON}.expert_tensor_parallel_size", _none_or(WHOLE), None)
    mbridge: bool = _at(f"{_MEGATRON}.use_mbridge", SWITCH, True)
    dynamic_cp: bool = _at(f"{_MEGATRON}.dynamic_context_parallel", SWITCH, False)
    max_seqlen: int | None = _at(f"{_MEGATRON}.max_seqlen_per_dp_cp_rank", _none_or(WHOLE), None)
    vanilla_mbridge: bool = _at(f"{_MEGATRON}.vanilla_mbridge", SWITCH, False)
    megatron_fsdp: bool = _at(f"{_MEGATRON}.use_megatron_fsdp", SWITCH, False)
    pad_to_length: bool = _at(f"{_MEGATRON}.pad_to_length", SWITCH, False)
    dtype: str = _at(f"{_MEGATRON}.dtype", TEXT, "bfloat16")
    unused_remove_padding: bool = _at(f"{_MEGATRON}.use_remove_padding", SWITCH, True)
    unused_fused: bool = _at(f"{_MEGATRON}.use_fused_kernels", SWITCH, False)
    per_token: bool | None = _at(
        f"{_MEGATRON}.override_transformer_config.{PER_TOKEN}",
        _none_or(SWITCH),
        None,
    )
    balancing: str | Sequence[str] | None = _at(
        f"{_MEGATRON}.override_transformer_config.moe_router_load_balancing_type",
        _none_or(TEXTS),
        None,
    )
    z_loss: float | None = _at(
        f"{_MEGATRON}.override_transformer_config.moe_z_loss_coeff", _none_or(NUMBER), None
    )
    aux_coef: float | None = _at(
        f"{_MEGATRON}.override_transformer_config.moe_aux_loss_coeff", _none_or(NUMBER), None
    )
    collective_average: bool = _at(
        f"{_MEGATRON}.override_ddp_config.average_in_collective", SWITCH, False
    )
    remove_padding: bool = _at(f"{ROOT}.model.use_remove_padding", SWITCH, True)
    fused: bool = _at(f"{ROOT}.model.use_fused_kernels", SWITCH, False)
    mtp: bool = _at(f"{ROOT}.model.mtp.enable_train", SWITCH, False)
    external: str | None = _at(f"{ROOT}.model.external_lib", _none_or(TEXT), None)
    model: str | None = _at(f"{ROOT}.model.path", _none_or(TEXT), None)
    hf_config: str | None = _at(f"{ROOT}.model.hf_config_path", _none_or(TEXT), None)
    responses: int = _at(f"{ROOT}.rollout.n", WHOLE, 1)
    distillation: bool = _at("distillation.enabled", SWITCH, False)
    rejection: str | None = _at(f"{_CORRECTION}.rollout_rs", _none_or(TEXT), None)
    bypass: bool = _at(f"{_CORRECTION}.bypass_mode", SWITCH, False)
    own_correction_loss: str = _at(f"{_OWN_CORRECTION}.loss_type", TEXT, "ppo_clip")
    own_correction_weights: str | None = _at(
        f"{_OWN_CORRECTION}.rollout_is", _none_or(TEXT), "sequence"
    )
    own_correction_norm: bool = _at(f"{_OWN_CORRECTION}.rollout_is_batch_normalize", SWITCH, False)
    gpus_per_node: int = _at("trainer.n_gpus_per_node", WHOLE, 8)
    nodes: int = _at("trainer.nnodes", WHOLE, 1)
    max_prompt: int = _at("data.max_prompt_length", WHOLE, 512)
    max_response: int = _at("data.max_response_length", WHOLE, 512)
    use_v1: bool = _at("trainer.use_v1", SWITCH, False)
    train_batch: int | None = _at("data.train_batch_size", _none_or(COUNT), None)
    module: str = "verl.trainer.main_ppo"
    given: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()

    def is_given(self, name: str) -> bool:
        """Whether the file or an override sets field `name`, to a value that is known."""
        return _key(name) in self.given - self.unknown

    @property
    def B(self) -> int:
        """Sequences of a mini-batch, as verl's `_update_actor` counts them."""
        return self.mini_batch * self.responses

    @property
    def may_replace_loss(self) -> bool:
        """Whether the trainer writes `bypass_mode` over the configured policy loss.

        verl's older trainers do, in their own process, where `algorithm.rollout_correction.
        bypass_mode` is set. `main_ppo` with `trainer.use_v1` has `_compute_old_log_prob` copy
        log-probabilities and no more.
        """
        return self.bypass and not (self.module == "verl.trainer.main_ppo" and self.use_v1)

    @property
    def normalizes_weights(self) -> bool:
        """Whether verl's `compute_policy_loss_bypass_mode` runs as REINFORCE with weights that it
        divides by their mean over the micro-batch, by the correction in `policy_loss`."""
        weighted = self.own_correction_loss == "reinforce" and self.own_correction_weights
        return bool(self.loss == "bypass_mode" and weighted and self.own_correction_norm)

    @property
    def D(self) -> int | None:
        """Data-parallel replicas, None if nothing speaks of GPUs or their number is not known."""
        if not (self.is_given("gpus_per_node") or self.is_given("nodes")):
            return None
        if self.unknown & {_key("gpus_per_node"), _key("nodes")}:
            return None
        return self.gpus_per_node * self.nodes // (self.tp * self.pp * self.cp)


def check(settings: Settings) -> None:
    """`ValueError` for values that verl refuses before it trains, or that do not go together."""
    s = settings
    _name_of(s, "strategy", STRATEGIES)
    if s.strategy != "megatron":
        return
    if s.external is None:  # that code may register a loss of its own
        _name_of(s, "loss", losses())
    if s.loss == "bypass_mode":
        _name_of(s, "own_correction_loss", ("ppo_clip", "reinforce"))
    _name_of(s, "mode", modes())
    _name_of(s, "dtype", ("bfloat16", "float16"))
    if s.vpp is not None and s.pp == 1:
        raise ValueError(f"{_key('vpp')} is {s.vpp}, allowed is null unless PP is above 1")
    ranks = s.tp * s.pp * s.cp
    gpus = s.gpus_per_node * s.nodes
    if s.D is not None and gpus % ranks:
        raise ValueError(
            f"trainer.n_gpus_per_node times trainer.nnodes is {gpus}, allowed is a multiple of the "
            f"{ranks} ranks that TP {s.tp}, PP {s.pp} and CP {s.cp} need"
        )
    if s.D is not None and not s.dynamic_cp and s.B % s.D:
        raise ValueError(
            f"{_key('mini_batch')} times rollout.n is {s.B}, allowed is a multiple of the {s.D} "
            "data-parallel replicas"
        )
    if not s.dynamic_batch and s.micro_batch and s.all_micro_batch:
        raise ValueError(
            f"{_key('all_micro_batch')} is {s.all_micro_batch}, allowed is null beside "
            "ppo_micro_batch_size_per_gpu"
        )
    if not s.dynamic_batch and s.D is not None and s.micro_batch and s.B // s.D % s.micro_batch:
        raise ValueError(
            f"{_key('micro_batch')} is {s.micro_batch}, allowed is a divisor of the "
            f"{s.B // s.D} sequences of a replica"
        )
    if s.loss == "dro" and s.dro_beta is None:
        raise ValueError(f"{_key('dro_beta')} is None, allowed is a number where loss_mode is dro")
    if s.dynamic_cp and s.max_seqlen is None:
        raise ValueError(
            f"{_key('max_seqlen')} is None, allowed is an integer of at least 1 with dynamic CP"
        )


def _name_of(settings, name, names):
    value = getattr(settings, name)
    if value not in names:
        raise ValueError(f"{_key(name)} is {short(value)}, allowed is one of {', '.join(names)}")


MAY_BE_UNKNOWN = frozenset(
    f.metadata["key"]
    for f in dataclasses.fields(Settings)
    if f.name in ("model", "hf_config", "gpus_per_node", "nodes", "max_prompt", "max_response")
)
"""Keys without whose values there is a verdict too."""


@functools.cache
def _key(name):
    """Where the configuration holds field `name` of `Settings`."""
    return next(f.metadata["key"] for f in dataclasses.fields(Settings) if f.name == name)
