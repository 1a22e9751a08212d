"""verl's engine with another way to report its tokens: repairs of the count, and an older return.

Each overrides `postprocess_micro_batch_func` of verl 0.9.1 and changes what that hands to Megatron
in the per-token regime; in the averaging regime there is no count to change.
"""

import torch
from megatron.core import parallel_state as mpu

from cpnorm.engine.step import Engine


class Remainder(Engine):
    """CP rank r reports `t // C`, and one token more if `r < t mod C`: the counts add up to t."""

    def postprocess_micro_batch_func(self, output, data, *args, **kwargs):
        loss, _, output = super().postprocess_micro_batch_func(output, data, *args, **kwargs)
        C = mpu.get_context_parallel_world_size()
        spread = self._routed_num_tokens(data) + C - 1 - mpu.get_context_parallel_rank()
        return loss, (spread // C).to(torch.int), output


class FullCount(Engine):
    """Every CP rank reports t, and its loss is C times as large: both grow by C."""

    def postprocess_micro_batch_func(self, output, data, *args, **kwargs):
        loss, _, output = super().postprocess_micro_batch_func(output, data, *args, **kwargs)
        tokens = self._routed_num_tokens(data).to(torch.int)
        return loss * mpu.get_context_parallel_world_size(), tokens, output


class TwoValues(Engine):
    """Loss times M and no count, as in the averaging regime: what verl 0.8.0 returns."""

    def postprocess_micro_batch_func(self, output, data, *args, **kwargs):
        loss, _, output = super().postprocess_micro_batch_func(output, data, *args, **kwargs)
        share = data["routed_num_tokens"] / data["dp_size"]
        return loss / share * data["num_micro_batch"], output


VARIANTS = {
    "verl": Engine,
    "remainder": Remainder,
    "full count": FullCount,
    "two values": TwoValues,
}
"""Name: engine."""
