"""How many tokens verl routes in each micro-batch of a mini-batch."""

from collections.abc import Sequence
from dataclasses import replace

from cpnorm import case
from cpnorm.settings import Settings


def tokens(
    s: Settings, D: int | None, lengths: Sequence[case.Sequence]
) -> tuple[tuple[int, ...], ...]:
    """Routed tokens `t[d][m]` of a mini-batch of these sequences, each replica a consecutive block.

    With `use_dynamic_bsz` verl itself splits a replica's block. `ValueError` if D is unknown, the
    sequences are not as many as the configuration says, or cannot be divided so.
    """
    if s.is_given("mini_batch") and len(lengths) != s.B:
        raise ValueError(
            f"there are lengths of {len(lengths)} sequences, allowed are those of a mini-batch: "
            f"ppo_mini_batch_size times rollout.n, {s.B}"
        )
    if D is None:
        raise ValueError("lengths need the number of replicas, give trainer.nnodes or --dp")
    whole = case.Case(sequences=tuple(lengths), dp=D)
    if not s.dynamic_batch:
        if s.micro_batch is None:
            raise ValueError("lengths need actor.ppo_micro_batch_size_per_gpu or use_dynamic_bsz")
        return replace(whole, micro_batch_size=s.micro_batch).t
    return _by_tokens(whole.t, s)


def _by_tokens(replicas, s):
    """verl's own `rearrange_micro_batches`; all replicas get as many as the one that needs most."""
    import torch
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    def split(replica, least):
        ids = torch.nested.as_nested_tensor(
            [torch.zeros(n, dtype=torch.int64) for n in replica], layout=torch.jagged
        )
        data = TensorDict({"input_ids": ids}, batch_size=len(replica))
        try:
            _, parts = rearrange_micro_batches(
                data,
                s.max_token_len * s.cp,
                num_batches_divided_by=s.pp if (s.vpp or 1) > 1 else None,
                min_num_micro_batch=least,
            )
        except (AssertionError, ValueError) as error:
            raise ValueError(f"verl does not split these lengths: {error}") from error
        return tuple(sum(replica[i] for i in part) for part in parts)

    least = None
    while True:
        t = tuple(split(replica, least) for replica in replicas)
        if len({len(parts) for parts in t}) == 1:
            return t
        least = max(map(len, t))
