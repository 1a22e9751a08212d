"""The places where Megatron-Core computes in float32 whatever the model's dtype, in float64.

In a float64 run three of them are all that differs from `cpnorm.oracle` by more than 1e-13: the
vocabulary-parallel cross entropy, the softmax of the mixture-of-experts router, and the reciprocal
of the token count. `float64` takes them out, to show that they are all of it. The fourth, the table
of the rotary embedding, is a constant of the model, and the oracle's is the same in float32.
"""

from contextlib import AbstractContextManager

import torch

from cpnorm.engine.cuda_on_cpu import replaced

_float, _softmax, _reciprocal = torch.Tensor.float, torch.softmax, torch.Tensor.__rtruediv__


def _keep(x, **options):
    """`x.float()`. A copy, as the cast would make, because Megatron-Core goes on in place."""
    return x.clone() if x.dtype is torch.float64 else _float(x, **options)


def _softmax_of(x, *args, dtype=None, **options):
    kept = None if (x.dtype, dtype) == (torch.float64, torch.float32) else dtype
    return _softmax(x, *args, dtype=kept, **options)


def _divided_by(n, one):
    return _reciprocal(n if n.is_floating_point() else n.double(), one)


REPLACED = {
    "torch.Tensor.float": (_keep, "`VocabParallelCrossEntropy.calculate_logits_max`"),
    "torch.softmax": (_softmax_of, "`topk_routing_with_score_function`"),
    "torch.Tensor.__rtruediv__": (_divided_by, "`1.0 / num_tokens` in `finalize_model_grads`"),
}
"""Dotted name: (replacement, where Megatron-Core calls it)."""


def float64() -> AbstractContextManager:
    """Within it, float64 stays float64 there, and an integer's reciprocal is float64."""
    return replaced(REPLACED)
