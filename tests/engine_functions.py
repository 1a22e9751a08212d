"""What the ranks of test_attention.py, test_engine.py and test_pretend_cuda.py run."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist

from cpnorm.topology import topology
from pretend_cuda import pretend_cuda


def attention_on_rank(dp, cp, query, key, value, weight, starts, device="cpu"):
    """Rows of this CP rank, its output, and its gradients of sum(output * weight).

    On a `device` "cuda" that is pretended.
    """
    from megatron.core import parallel_state

    from cpnorm.engine.attention import CPAttention, packed_rows

    with topology(dp, cp), pretend_cuda(one_gpu=True) if device == "cuda" else nullcontext():
        group = parallel_state.get_context_parallel_group()
        attention = CPAttention(SimpleNamespace())
        starts = starts.to(device)
        rows = packed_rows(starts, cp, group.rank())
        leaves = [x[rows].to(device, copy=True).requires_grad_() for x in (query, key, value)]
        packed = SimpleNamespace(cu_seqlens_q_padded=starts)
        out = attention(*leaves, None, packed_seq_params=packed)
        gradients = torch.autograd.grad((out * weight[rows].to(device)).sum(), leaves)
        return rows, *(x.cpu() for x in (out.detach(), *gradients))


def step_on_both_devices(case, model, exact=False, variant="verl", one_gpu=False):
    """`run_rank` on the CPU and on a pretended GPU, with the attention kernel that both have."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from cpnorm.engine.step import run_rank
    from cpnorm.engine.variants import VARIANTS

    with sdpa_kernel(SDPBackend.MATH):
        expected = run_rank(case, model, exact, VARIANTS[variant])
        with pretend_cuda(one_gpu):
            return expected, run_rank(case, model, exact, VARIANTS[variant], "cuda")


def gather_rows_on_rank():
    """<gather(x), y> over all ranks and <x, backward(y)> over all ranks, y another on each."""
    from cpnorm.engine.attention import GatherRows

    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = (torch.Generator().manual_seed(seed) for seed in (rank, 100 + rank))
    x = torch.randn(3, 2, generator=x, dtype=torch.float64).requires_grad_()
    y = torch.randn(3 * size, 2, generator=y, dtype=torch.float64)
    gathered = GatherRows.apply(x, dist.group.WORLD)
    (back,) = torch.autograd.grad(gathered, x, y)
    sums = torch.stack([(gathered * y).sum(), (x * back).sum()]).detach()
    dist.all_reduce(sums)
    return sums.tolist()


def offsets_after_a_step(sequences, copy):
    """Offsets of the replica's nested `input_ids` before and after a step of two replicas, and the
    largest gradient.

    `copy` False runs verl's own `_routed_num_tokens`, True the engine's copy of its count.
    """
    from functools import partial

    from megatron.core import parallel_state
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
    from verl.workers.utils.losses import ppo_loss

    from cpnorm.case import Case
    from cpnorm.engine import step
    from cpnorm.engine.cuda_on_cpu import cuda_on_cpu
    from cpnorm.losses import actor_config
    from cpnorm.transformer import Model

    case = Case(sequences=sequences, dp=2)
    model = Model()
    weights, ids, batch = step.numbers(case.sequences, case.seed, case.dtype, model)
    with cuda_on_cpu(), topology(case.dp):
        engine = step.Engine(step.MODEL_CONFIG, step.engine_config(case), None, None)
        engine.initialize(case, model, weights)
        if not copy:
            own = MegatronEngineWithLMHead._routed_num_tokens
            engine._routed_num_tokens = partial(own, engine)
        data = step.data_of_replica(case, ids, batch, parallel_state.get_data_parallel_rank())
        before = data["input_ids"].offsets().tolist()
        engine.forward_backward_batch(data, partial(ppo_loss, config=actor_config(case)))
        largest = max(float(p.main_grad.abs().max()) for p in engine.module[0].parameters())
        return before, data["input_ids"].offsets().tolist(), largest


def dot_product_attention(query, key, value):
    """Output of Megatron-Core's own `DotProductAttention`, and of ours, for one causal sequence."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from cpnorm.engine.attention import CPAttention
    from cpnorm.engine.cuda_on_cpu import cuda_on_cpu

    rows, heads, width = query.shape
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * width,
        num_attention_heads=heads,
        num_query_groups=key.shape[1],
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        params_dtype=query.dtype,
    )
    with cuda_on_cpu(), topology():
        theirs = DotProductAttention(config, 1, AttnMaskType.causal, "self")
        hidden = ~torch.ones(rows, rows, dtype=torch.bool).tril()[None, None]
        batched = (x[:, None] for x in (query, key, value))
        packed = SimpleNamespace(cu_seqlens_q_padded=torch.tensor([0, rows]))
        ours = CPAttention(config)(query, key, value, None, packed_seq_params=packed)
        return theirs(*batched, hidden)[:, 0], ours
