"""What verl and Megatron-Core ask of CUDA, answered by the CPU.

`REPLACED` lists every name that is replaced while a step runs, with the reason. A test fails when
one of them disappears upstream.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class NoStream:
    """A CUDA stream where there are none: everything has already happened."""

    def __init__(self, *_):
        pass

    def wait_stream(self, other):
        pass


class NoDraws:
    """A CUDA random number generator from which nothing is drawn, since dropout is 0."""

    fork = staticmethod(nullcontext)


class CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"` in any call, and `Tensor.cuda()`, mean the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = kwargs | {"device": CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


REPLACED = {
    "torch.cuda.current_device": (lambda: CPU, "buffers and messages are made on it"),
    "torch.cuda.current_stream": (NoStream, "Megatron-Core's DDP waits for it"),
    "torch.cuda.default_stream": (NoStream, "Megatron-Core's DDP waits for it"),
    "torch.cuda.stream": (nullcontext, "Megatron-Core's DDP switches to it"),
    "torch.cuda.synchronize": (lambda *_: None, "pipeline stages wait for it after a message"),
    "verl.workers.engine.megatron.transformer_impl.get_device_id": (
        lambda: CPU,
        "verl moves its batch and its counts there",
    ),
    "megatron.core.tensor_parallel.get_cuda_rng_tracker": (
        NoDraws,
        "the embedding's dropout draws from it under sequence parallelism",
    ),
    "torch.compile": (
        lambda function=None, **_: function or (lambda inner: inner),
        "verl compiles one product in its entropy: a compiler run in every process",
    ),
}
"""Dotted name: (replacement, why it is asked for)."""

UNDEFINED = "megatron.core.transformer.moe.moe_utils.te_general_gemm"
"""Megatron-Core 0.16.1 reads this name without Transformer Engine, and defines it only with it."""


@contextmanager
def cuda_on_cpu():
    """Within it, Megatron-Core's schedules and buffers and verl's engine run without CUDA."""
    with ExitStack() as stack:
        for name, (replacement, _) in REPLACED.items():
            stack.enter_context(mock.patch(name, replacement))
        stack.enter_context(mock.patch(UNDEFINED, None, create=True))
        stack.enter_context(CudaMeansCpu())
        yield
