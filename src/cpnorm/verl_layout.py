"""verl's own packing and gathering, run for every context-parallel rank in one process.

Sizes and ranks come from stand-ins for Megatron's `parallel_state` getters, and the collective
from a stand-in for `torch.distributed.all_gather`. All else is verl 0.9.1's
`verl/models/mcore/util.py`.
"""

from contextlib import contextmanager
from unittest import mock

import torch
from verl.models.mcore import util


@contextmanager
def rank(c: int, C: int, tp: int = 1):
    """Within it, verl takes itself for CP rank `c` of `C`, with tensor-parallel size `tp`."""
    getters = {
        "get_context_parallel_world_size": C,
        "get_context_parallel_rank": c,
        "get_context_parallel_group": None,
        "get_tensor_model_parallel_world_size": tp,
    }
    with mock.patch.multiple(
        util.mpu, **{k: mock.Mock(return_value=v) for k, v in getters.items()}
    ):
        yield


def packed(lengths: tuple[int, ...], C: int, tp: int = 1, layout: str = "zigzag"):
    """What `preprocess_thd_engine` hands to each rank: a list of (ids, packed_seq_params).

    `ids` is `(rows of the rank,)`: 1 + the row of the micro-batch that each holds, 0 for padding.
    `ValueError` of verl's if the installed Megatron-Core has no contiguous layout and C is not 1.
    """
    results = []
    for c in range(C):
        with rank(c, C, tp):
            ids, params, _ = util.preprocess_thd_engine(_numbers(lengths), cp_layout=layout)
        results.append((ids[0], params))
    return results


def owners(lengths: tuple[int, ...], C: int, tp: int = 1, layout: str = "zigzag") -> torch.Tensor:
    """`cpnorm.layout.owners`, read off what verl hands out: bool `(C, sum(lengths))`."""
    own = torch.zeros(C, sum(lengths) + 1, dtype=torch.bool)
    for c, (ids, _) in enumerate(packed(lengths, C, tp, layout)):
        own[c, ids] = True
    return own[:, 1:]


def gathered(
    rows: torch.Tensor, lengths: tuple[int, ...], C: int, tp: int = 1, layout: str = "zigzag"
) -> torch.Tensor:
    """What `postprocess_thd_engine` gives to each rank, `(C, R)`, with autograd.

    `rows (C, R)` holds in line c what rank c computes for every row; only what rank c owns leaves
    it. Padding is filled with NaN, so that none can slip through.
    """
    parts = packed(lengths, C, tp, layout)
    local = []
    for c, (ids, _) in enumerate(parts):
        with_padding = torch.cat([rows.new_full((1,), torch.nan), rows[c]])
        local.append(with_padding[ids][None])

    def all_gather(output_list, tensor, group=None):
        for target, output in zip(output_list, local, strict=True):
            target.copy_(output.detach())

    lines = []
    with mock.patch.object(torch.distributed, "all_gather", all_gather):
        for c, (_, params) in enumerate(parts):
            with rank(c, C, tp):
                output = util.postprocess_thd_engine(
                    local[c], params, _numbers(lengths), len(lengths), cp_layout=layout
                )
            lines.append(output.values())
    return torch.stack(lines)


def _numbers(lengths):
    """Nested input ids that number the rows of the micro-batch 1, 2, ..."""
    return torch.nested.as_nested_tensor(
        list(torch.arange(1, 1 + sum(lengths)).split(list(lengths))), layout=torch.jagged
    )
