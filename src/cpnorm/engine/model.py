"""The tiny model on Megatron-Core: the same weights in every topology, gradients back as one.

A full set of weights, named as `GPTModel` names them without tensor and pipeline parallelism, is
cut into the shard of each rank. `result.join` puts the ranks' gradients back together.
"""

import re

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from cpnorm.case import Case
from cpnorm.engine import transformer_engine_runs
from cpnorm.engine.attention import CPAttention
from cpnorm.transformer import Model


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm, its weight marked so that Megatron-Core sums its gradient over TP ranks.

    Under sequence parallelism Megatron-Core's own `WrappedTorchNorm` refuses, and its other norms
    need Transformer Engine or Apex.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def attention(case: Case, device: str) -> type:
    """Transformer Engine's attention where it can run: on CUDA, in bfloat16. Otherwise ours."""
    if transformer_engine_runs(case, device):
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return TEDotProductAttention
    return CPAttention


def block(config: TransformerConfig, stage: int | None, core: type) -> TransformerBlockSubmodules:
    """Megatron-Core's local layer specification for this stage, with `core` as its attention and
    our norm."""
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = core
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    layers = get_num_layers_to_build(config, stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=Norm)


def transformer_config(case: Case, model: Model) -> TransformerConfig:
    """Megatron's configuration of `model` in the topology of `case`, without CUDA kernels.

    Sequence parallelism beside tensor parallelism and the kind of messages between stages are those
    that verl 0.9.1 sets. Nothing is fused, no dropout, no bias; attention's softmax computes in the
    model's dtype.
    """
    dtype = getattr(torch, case.dtype)
    moe = {
        "num_moe_experts": model.experts,
        "moe_router_topk": model.topk,
        "moe_ffn_hidden_size": model.ffn,
        "moe_router_load_balancing_type": "aux_loss" if model.aux else "none",
        "moe_aux_loss_coeff": model.aux,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
    }
    config = TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        ffn_hidden_size=model.ffn,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        context_parallel_size=case.cp,
        sequence_parallel=case.tp > 1,
        overlap_p2p_comm=case.vpp is not None,
        batch_p2p_comm=False,
        calculate_per_token_loss=case.regime == "per-token",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        attention_softmax_in_fp32=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **(moe if model.experts else {}),
    )
    config.variable_seq_lengths = True  # micro-batches differ in rows: stages exchange shapes
    return config


def build(
    case: Case, model: Model, full: dict[str, torch.Tensor], device: str = "cpu"
) -> list[DistributedDataParallel]:
    """This rank's model chunks, one for each virtual stage, wrapped for data parallelism.

    Gradients of a bfloat16 model are summed in float32, as verl 0.9.1 has it by default.
    """
    config = transformer_config(case, model)
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=False,
        use_distributed_optimizer=False,
        grad_reduce_in_fp32=case.dtype == "bfloat16",
    )
    chunks = []
    for stage in range(case.vpp or 1):
        where = {"ignore_virtual": False, "vp_stage": stage if case.vpp else None}
        gpt = GPTModel(
            config,
            block(config, where["vp_stage"], attention(case, device)),
            vocab_size=model.vocab,
            max_sequence_length=1,  # rotary embedding needs no table
            position_embedding_type="rope",
            pre_process=mpu.is_pipeline_first_stage(**where),
            post_process=mpu.is_pipeline_last_stage(**where),
            vp_stage=where["vp_stage"],
        ).to(device, config.params_dtype)
        for name, parameter in parameters(gpt):
            parameter.data.copy_(shard(name, parameter, full[name]))
        chunks.append(DistributedDataParallel(config, ddp, gpt))
    return chunks


def parameters(gpt: GPTModel):
    """Each `(name, parameter)` of a chunk, its layers numbered as in the whole model."""
    for name, parameter in gpt.named_parameters():
        layer = re.match(r"decoder\.layers\.(\d+)\.", name)
        if layer:
            number = gpt.decoder.layers[int(layer[1])].layer_number - 1
            name = f"decoder.layers.{number}.{name[layer.end() :]}"
        yield name, parameter


def shard(name: str, parameter: torch.nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """The part of `full` that this tensor-parallel rank holds as `parameter`."""
    if parameter.shape == full.shape:
        return full
    tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    dim = cut_dimension(parameter)
    gated = name.endswith("linear_fc1.weight")  # gate and up projection, cut one by one
    pieces = full.chunk(2, dim) if gated else (full,)
    return torch.cat([piece.chunk(tp, dim)[rank] for piece in pieces], dim)


def cut_dimension(parameter: torch.nn.Parameter) -> int | None:
    """Dimension along which tensor parallelism cuts `parameter`, None where it does not."""
    parallel = getattr(parameter, "tensor_model_parallel", False)
    return parameter.partition_dim if parallel else None
