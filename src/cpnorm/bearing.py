"""Which keys of a configuration bear on loss normalisation, and which values of them were examined.

Every key of verl's actor and of its model is in one of three places: `Settings` reads it, `NEUTRAL`
says that it changes how, where or on what data a gradient is computed and not how it is
normalised, or `EXAMINED` has the values that the book's runs have. Any other key, or value, is
unexamined: that is a reason for "not covered". The tables were read from verl 0.9.1.
"""

import re
from collections.abc import Iterator
from dataclasses import fields

from omegaconf import DictConfig, OmegaConf

from cpnorm.settings import ROOT, Settings
from cpnorm.user_file import short

_OVERRIDE = "actor.megatron.override_transformer_config"

WITHOUT = re.compile(
    r"(critic|data|global_profiler|ray_kwargs|reward|reward_manager|reward_model|rollout"
    r"|custom_reward_function|sandbox_fusion|transfer_queue|async_training|profiler)\b"
    r"|trainer\.(?!n_gpus_per_node$|nnodes$|use_|v1\b|strategy)"
    rf"|{ROOT}\.(ref\.|rollout\.(?!n$)|nccl_timeout$|hybrid_engine$)"
    rf"|{ROOT}\.actor\.(optim|checkpoint|profiler)\."
    rf"|{ROOT}\.actor\.megatron\.\w+_offload$"
)
"""Keys that have no bearing on the normalisation of the policy loss, whatever a release makes of
them: other models, data, rollouts, logging, the optimizer, what lies in which memory."""

NEUTRAL = re.compile(
    # how the optimizer uses the gradient, what is stored and what is timed
    r"actor\.(optim|checkpoint|profiler|profile)\b.*"
    # constants of a token's loss, metrics, order of the data
    r"|actor\.(tau_pos|tau_neg|clip_ratio|clip_ratio_c|kl_loss_type|rollout_n)"
    r"|actor\.policy_loss\.(clip_cov_\w+|kl_cov_ratio|ppo_kl_coef|rollout_correction\..*)"
    r"|actor\.(calculate_entropy|calculate_sum_pi_squared|use_torch_compile|ppo_epochs|shuffle)"
    r"|actor\.(data_loader_seed|use_rollout_log_probs|freeze_vision_tower|grad_clip)"
    r"|actor\.(ppo_infer_\w+|entropy_from_logits_chunk_size|qat\.(?!enable$).*)"
    # memory, checkpoints, and what verl's worker overwrites
    r"|actor\.megatron\.(\w+_offload|use_dist\w+|dist_\w+|distrib_\w+|seed|full_determinism)"
    r"|actor\.megatron\.(infer_\w+|max_token_len_per_gpu|micro_batch_size_per_gpu|use_dynamic_bsz)"
    r"|actor\.megatron\.(override_transformer_config\.)?sequence_parallel"
    r"|actor\.megatron\.(strategy|forward_only|pad_bshd_to_minibatch_max)"
    r"|actor\.megatron\.(pad_to_length_bucket|entropy_from_logits_chunk_size)"
    r"|actor\.megatron\.(qat\.(?!enable$).*|router_replay\.(?!mode$).*)"
    # the model's files, and switches of parts that are off
    r"|model\.((hf_config|tokenizer)_path|use_shm|trust_remote_code|custom_chat_template)"
    r"|model\.(enable_gradient_checkpointing|enable_activation_offload|load_tokenizer)"
    r"|model\.(target_modules|target_parameters|exclude_modules|lora_alpha|lora\.(?!rank$).*)"
    r"|model\.(fused_kernel_options\..*|tiled_mlp\.num_shards|mtp\.(?!enable$|enable_train$).*)"
    r"|model\.override_config\.(model_config\.)?max_position_embeddings"
)
"""Keys below `actor_rollout_ref` that do not change how a gradient is normalised."""

SAME_GRADIENT = re.compile(
    rf"{_OVERRIDE}\.("
    r"recompute_\w+|attention_backend|use_flash_attn|apply_rope_fusion|\w+_fusion|persist_layer_norm"
    r"|deallocate_pipeline_outputs|moe_grouped_gemm|moe_router_dtype|moe_token_dispatcher_type"
    r"|moe_enable_deepep|moe_shared_expert_overlap|num_layers_in_(first|last)_pipeline_stage"
    r"|account_for_(embedding|loss)_in_pipeline_split|pipeline_model_parallel_layout"
    r"|use_fused_(rmsnorm|swiglu)|use_distributed_optimizer)"
    r"|actor\.megatron\.use_distributed_optimizer"
    r"|actor\.megatron\.override_ddp_config\."
    r"(overlap_\w+|grad_reduce_in_fp32|bucket_size|use_distributed_optimizer|align_param_gather)"
)
"""Keys below `actor_rollout_ref` with which Megatron-Core computes the same gradient in another
way: recomputation, fused kernels, a pipeline's layout, the dispatch of tokens, overlapped
communication. The book does not run them; a verdict says so where one is set."""

OFF = (None, False, "None", "null")
EXAMINED = {
    "actor.use_fused_kernels": OFF,
    "actor.use_prefix_grouper": OFF,
    "actor.entropy_from_logits_with_chunking": OFF,
    "actor.qat.enable": OFF,
    "actor.megatron.qat.enable": OFF,
    "actor.megatron.entropy_from_logits_with_chunking": OFF,
    "actor.megatron.router_replay.mode": (*OFF, "disabled"),
    f"{_OVERRIDE}.fp8": OFF,
    f"{_OVERRIDE}.attention_dropout": (0,),
    f"{_OVERRIDE}.hidden_dropout": (0,),
    "model.lora_rank": (0,),
    "model.lora_adapter_path": OFF,
    "model.lora.rank": (0,),
    "model.use_liger": OFF,
    "model.tiled_mlp.enabled": OFF,
    "model.mtp.enable": OFF,
    "model.model_type": ("language_model",),
}
"""Key below `actor_rollout_ref` -> values that it has in the book's runs."""

SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
"""Sizes that `override_transformer_config` can set after the engine did, and their settings."""

WHAT = {
    "lora": "LoRA trains adapters",
    "qat": "quantisation-aware training changes the forward pass",
    "router_replay": "router replay takes the experts from a record",
    "fp8": "fp8 changes the matrix products and the scales of their gradients",
    "mtp": "multi-token prediction adds another loss",
    "dropout": "dropout draws on every rank",
    "external_lib": "verl imports that code",
}
"""What a part of a key's name means, in words."""


def is_without(key: str) -> bool:
    """Whether a key, which verl may refuse, has no bearing on normalisation in any release."""
    return WITHOUT.match(key) is not None


def unexamined(config: DictConfig, settings: Settings) -> tuple[dict[str, str], tuple[str, ...]]:
    """Keys below `actor_rollout_ref`, of a composed `config`, that were not examined, or their
    values not, each with a sentence; and the names of those in `SAME_GRADIENT` that are given."""
    read = {f.metadata["key"] for f in fields(Settings) if f.metadata}
    found, same = {}, []
    for key, node, last in _leaves(config[ROOT], ("actor", "model")):
        if last == "_target_":
            neutral = str(node[last]).startswith("verl.")
        else:
            neutral = f"{ROOT}.{key}" in read or NEUTRAL.fullmatch(key)
        if neutral:
            continue
        if SAME_GRADIENT.fullmatch(key):
            if f"{ROOT}.{key}" in settings.given:
                same.append(last)
            continue
        value = node[last]
        if key.startswith(_OVERRIDE) and last in SIZES:
            own = getattr(settings, SIZES[last])
            if value != own:
                found[key] = (
                    f"override_transformer_config sets {last} to {short(value)} after the engine "
                    f"set it to {own}"
                )
        elif not (key in EXAMINED and value in EXAMINED[key]):
            twice = {"actor.use_fused_kernels": settings.fused, "model.mtp.enable": settings.mtp}
            if twice.get(key):
                continue
            words = next((f": {text}" for part, text in WHAT.items() if part in key), "")
            found[key] = f"{ROOT}.{key} is {short(value)}, which the book does not run{words}"
    return found, tuple(dict.fromkeys(same))


def _leaves(node, keys, prefix="") -> Iterator[tuple[str, DictConfig, str]]:
    """Dotted name, mapping and key of each value in a mapping; no interpolation is resolved."""
    for key in keys:
        name = f"{prefix}{key}"
        plain = not (OmegaConf.is_interpolation(node, key) or OmegaConf.is_missing(node, key))
        inner = node[key] if plain else None
        if isinstance(inner, DictConfig):
            yield from _leaves(inner, inner, f"{name}.")
        elif not OmegaConf.is_missing(node, key):
            yield name, node, key
