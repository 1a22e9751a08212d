"""Attention of one context-parallel rank: the mathematics and its two collectives.

It stands in for Transformer Engine's, which needs CUDA: Megatron-Core's own `DotProductAttention`
refuses a context-parallel size above one. Projections, rotary embedding and the rest of the layer
stay Megatron's; this class goes in as `core_attention` of the layer specification.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention

from cpnorm.layout import contiguous, zigzag


class GatherRows(torch.autograd.Function):
    """Rows of all ranks in rank order. Backward, the adjoint: the ranks' gradients of own rows,
    summed.

    Both are an all-to-all: gloo's other collectives pass messages around a ring, and wait longer.
    """

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return _exchanged(torch.cat([rows] * group.size()), group)

    @staticmethod
    def backward(ctx, gradient):
        parts = _exchanged(gradient.contiguous(), ctx.group)
        return parts.unflatten(0, (ctx.group.size(), -1)).sum(0), None


def _exchanged(x, group):
    """The c-th part of every rank's `x`, in rank order, on rank c."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def packed_rows(starts: torch.Tensor, C: int, c: int, layout: str = "zigzag") -> torch.Tensor:
    """Rows of a padded, packed micro-batch that rank `c` of `C` holds, in its local order.

    `starts` are the padded sequences' offsets, `(sequences + 1,)`, as `cu_seqlens_q_padded`.
    """
    if layout == "contiguous":
        return contiguous(int(starts[-1]), C, c)
    lengths = starts.diff().tolist()
    return torch.cat(
        [start + zigzag(n, C, c) for start, n in zip(starts.tolist(), lengths, strict=False)]
    )


def causal(queries: torch.Tensor, keys: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Which key row a query row may see, bool `(queries, keys)`: the same sequence, not later."""
    ends = starts[1:].long()
    sequence = [torch.searchsorted(ends, rows, right=True) for rows in (queries, keys)]
    return (sequence[0][:, None] == sequence[1]) & (keys <= queries[:, None])


class CPAttention(MegatronModule):
    """Causal attention of a packed micro-batch whose rows are dealt out to the CP ranks.

    Keys and values of all ranks are gathered; a rank computes its own queries. Exact, not
    blockwise: memory grows with the square of the micro-batch's rows.
    """

    def __init__(self, config, *_, **__):
        super().__init__(config)
        self.group = parallel_state.get_context_parallel_group()

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **_):
        """`query (rows, heads, dim)`, `key`, `value (rows, groups, dim)` to `(rows, width)`."""
        C, c = self.group.size(), self.group.rank()
        starts = packed_seq_params.cu_seqlens_q_padded
        layout = getattr(packed_seq_params, "cp_partition_mode", None) or "zigzag"
        rows = [packed_rows(starts, C, rank, layout).to(starts.device) for rank in range(C)]
        if C > 1:
            both = GatherRows.apply(torch.cat((key, value), -1), self.group)
            key, value = both.chunk(2, -1)
        heads = [x.transpose(0, 1)[None] for x in (query, key, value)]
        mask = causal(rows[c], torch.cat(rows), starts)
        out = scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(len(query), -1)
