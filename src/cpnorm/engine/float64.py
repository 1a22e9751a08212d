"""The places where Megatron-Core computes in float32 whatever the model's dtype, in float64.

In a float64 run they are its only rounding above 1e-15: the vocabulary-parallel cross entropy,
the softmax of the mixture-of-experts router, and the reciprocal of the token count. `Float64`
takes them out, to show that they are all of it.
"""

import torch
from torch.overrides import TorchFunctionMode

RECIPROCALS = (torch.Tensor.__rdiv__, torch.Tensor.__rtruediv__)


class Float64(TorchFunctionMode):
    """Within it, three operations of Megatron-Core keep float64.

    `Tensor.float()` of a float64 tensor, in `VocabParallelCrossEntropy.calculate_logits_max`;
    `torch.softmax(…, dtype=torch.float32)` of one, in `topk_routing_with_score_function`; and
    `1.0 / num_tokens` of an integer tensor, in `finalize_model_grads`. A copy is returned where
    the cast would make one, because Megatron-Core goes on in place.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.float and args[0].dtype is torch.float64:
            return args[0].clone()
        if func is torch.softmax and args[0].dtype is torch.float64:
            kwargs = {k: v for k, v in kwargs.items() if (k, v) != ("dtype", torch.float32)}
        if func in RECIPROCALS and not args[0].is_floating_point():
            return args[1] / args[0].double()
        return func(*args, **kwargs)
