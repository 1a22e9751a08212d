"""What verl and Megatron-Core ask of CUDA, answered by the CPU.

`REPLACED` lists every name that is replaced while a step runs, with the reason. A test fails when
one of them disappears upstream.
"""

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from unittest import mock

import torch

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


def on_cpu(make):
    """The function `make` of torch, for which `device="cuda"` is the CPU."""

    def made(*args, device=None, **options):
        return make(*args, device=CPU if str(device).startswith("cuda") else device, **options)

    return made


REPLACED = {
    "torch.zeros": (on_cpu(torch.zeros), "Megatron-Core's schedules make their count there"),
    "torch.tensor": (on_cpu(torch.tensor), "Megatron-Core's loss scaler makes its scale there"),
    "verl.utils.seqlen_balancing.get_device_name": (
        lambda: "cpu",
        "verl agrees there on dynamic micro-batches",
    ),
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


def undefined_is_none() -> AbstractContextManager:
    """Within it, `UNDEFINED` is None where Megatron-Core has left it undefined.

    A GPU without Transformer Engine needs that too: without it the router raises `NameError`.
    """
    module, name = UNDEFINED.rsplit(".", 1)
    known = hasattr(import_module(module), name)
    return nullcontext() if known else mock.patch(UNDEFINED, None, create=True)


@contextmanager
def replaced(names: dict[str, tuple]):
    """Within it, each dotted name is its replacement; `names` as `REPLACED`."""
    with ExitStack() as stack:
        for name, (replacement, _) in names.items():
            stack.enter_context(mock.patch(name, replacement))
        yield


@contextmanager
def cuda_on_cpu():
    """Within it, Megatron-Core's schedules and buffers and verl's engine run without CUDA."""
    with replaced(REPLACED), mock.patch(UNDEFINED, None, create=True):
        yield
