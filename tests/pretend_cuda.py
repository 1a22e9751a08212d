"""Tensors that say they are on a GPU, with their numbers on the CPU.

Code meant for CUDA runs under `pretend_cuda` on a machine without a GPU, and raises where torch
would because it mixes devices. The numbers are the CPU's, bit for bit, where both take the same
kernel: `scaled_dot_product_attention` takes its plain kernel here.

What it cannot show: CUDA kernels and their rounding, NCCL, streams and what is not waited for,
Transformer Engine, the compiler, memory, and the device of a process. It is laxer than torch in one
point: a CPU tensor without dimensions may stand beside "cuda" tensors in every operation, where
torch allows it in elementwise ones. Stricter in another: a list as an index raises.

To C++ the tensors are on the meta device, which needs no driver; only Python hears "cuda". A tensor
that is on the meta device for another reason must not occur.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
from torch.nested._internal import nested_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

aten = torch.ops.aten
CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)
GENERATOR = torch.Generator()
"""The pretended GPU's own: `torch.manual_seed` seeds it too, the CPU's draws leave it alone."""

BETWEEN_DEVICES = (aten.copy_.default, aten._to_copy.default)
INDEXING = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
"""torch makes these empty on the meta device."""

POINT_TO_POINT = ("send", "recv_", "recv_any_source_")
"""Of what a step uses, what gloo does not copy to the CPU: it hands the socket a GPU's address."""

SET_DATA = torch.Tensor.data.__set__
MAKE_WRAPPER = torch.Tensor._make_wrapper_subclass


class Pretend(torch.Tensor):
    """A tensor "on cuda:0"; its numbers are `inner`, on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, inner):
        self = MAKE_WRAPPER(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=META,
        )
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, types, args, kwargs or {})

    def tolist(self):
        return self.inner.tolist()

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __repr__(self, **_):
        return f"{self.inner!r} on {CUDA}"


def run(func, types, args, kwargs, one_gpu=False):
    """One operation: on the CPU, its results "on cuda" where a GPU's would be."""
    if not set(types) <= {torch.Tensor, torch.nn.Parameter, Pretend}:
        return NotImplemented  # a nested tensor: torch takes it apart and comes back
    leaves, tree = tree_flatten((args, kwargs))
    ours = [x for x in leaves if isinstance(x, Pretend)]
    if ours and any(x.is_meta for x in leaves if type(x) is torch.Tensor):
        raise NotImplementedError(f"{func} with a tensor on the meta device: a list as an index?")
    wanted = kwargs.get("device")
    on_cuda = bool(ours) if wanted is None else is_cuda(wanted)
    if func.namespace == "c10d":
        check_collective(func, leaves, one_gpu)
    elif ours and func not in BETWEEN_DEVICES:
        check_devices(func, args, kwargs, leaves)
    if on_cuda and isinstance(generator := kwargs.get("generator"), torch.Generator):
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found {generator}")
    inner = [x.inner if isinstance(x, Pretend) else CPU if is_cuda(x) else x for x in leaves]
    args, kwargs = tree_unflatten(inner, tree)
    draws = on_cuda and torch.Tag.nondeterministic_seeded in func.tags
    with cuda_draws() if draws else nullcontext():
        out = func(*args, **kwargs)
    if on_cuda and "empty" in func.__name__:
        spoil(out)
    for x in ours:
        if x.shape != x.inner.shape or x.stride() != x.inner.stride():
            raise NotImplementedError(f"{func} changes a shape in place")
    known = {id(x): given for x, given in zip(inner, leaves, strict=True)}
    return tree_map_only(
        torch.Tensor,
        lambda x: known[id(x)] if id(x) in known else Pretend(x) if on_cuda else x,
        out,
    )


def is_cuda(x):
    """Whether it is the device of a `Pretend`, by the name that Python or C++ gives it."""
    return isinstance(x, torch.device) and x.type in ("cuda", "meta")


def check_devices(func, args, kwargs, leaves):
    """`RuntimeError` as torch's where an operation mixes devices."""
    if func in INDEXING:
        if not isinstance(args[0], Pretend) and any(isinstance(x, Pretend) for x in args[1]):
            raise RuntimeError("indices should be on the same device as the indexed tensor (cpu)")
        leaves = [args[0], *args[2:3]]  # indices may lie on the CPU
    given = [*args, *(kwargs.get(x.name) for x in func._schema.arguments[len(args) :])]
    written = [
        x
        for x, argument in zip(given, func._schema.arguments, strict=False)
        if argument.alias_info and argument.alias_info.is_write
    ]
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    wrong = [
        x
        for x in tensors
        if not isinstance(x, Pretend) and (x.dim() or any(x is one for one in written))
    ]
    if wrong and len(wrong) < len(tensors):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and cpu, in {func}"
        )


def check_collective(func, leaves, one_gpu):
    """`RuntimeError` for what NCCL lacks, or gloo where ranks share one GPU."""
    name = func._schema.name.removeprefix("c10d::")
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if one_gpu and name in POINT_TO_POINT and any(isinstance(x, Pretend) for x in tensors):
        raise RuntimeError(f"gloo cannot {name} a tensor that is on a GPU")
    if not one_gpu and name != "barrier" and not all(isinstance(x, Pretend) for x in tensors):
        raise RuntimeError(f"No backend type associated with device type cpu, in {func}")


@contextmanager
def cuda_draws():
    """Within it, the default generator goes on where `GENERATOR` is."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(GENERATOR.get_state())
        yield
        GENERATOR.set_state(torch.default_generator.get_state())


def spoil(x):
    """Memory without numbers gets some that are noticed."""
    if x.dtype is not torch.bool:
        x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)


class Operations(TorchDispatchMode):
    """Every operation, those without a `Pretend` among their arguments too."""

    def __init__(self, one_gpu):
        super().__init__()
        self.one_gpu = one_gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name == "aten::to":  # a nested tensor's: no copy where none is needed
            with self:
                return func.decompose(*args, **{k: as_meta(x) for k, x in kwargs.items()})
        return run(func, types, args, kwargs, self.one_gpu)


class Names(TorchFunctionMode):
    """Calls that name "cuda", before C++ looks for a driver; and `Tensor.data = ...`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == SET_DATA and any(isinstance(x, Pretend) for x in args):
            return set_data(*args)
        if func is torch._has_compatible_shallow_copy_type and isinstance(args[1], Pretend):
            return True  # as a CPU and a CUDA tensor are: `Module.to` keeps the parameter
        if func is torch.Tensor.cuda:
            return args[0].to(META)
        if func is torch.Tensor.new_tensor and isinstance(args[0], Pretend):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs).to(META)
        if func is torch.Tensor.to:
            args = tuple(map(as_meta, args))
        if as_meta(kwargs.get("device")) is META:
            if func in FROM_NUMBERS:
                numbers = func(*args, **kwargs | {"device": CPU})
                return numbers.detach().to(META).requires_grad_(numbers.requires_grad)
            kwargs = kwargs | {"device": META}
        return func(*args, **kwargs)


def as_meta(x):
    """A CUDA device, or its name, as the meta device; anything else as it is."""
    if isinstance(x, torch.device | str) and str(x).split(":")[0] == "cuda":
        return META
    return x


def set_data(self, value):
    """`self.data = value`: the same Python object, its attributes kept, with other numbers."""
    kept = {name: x for name, x in vars(self).items() if name != "inner"}
    new = value.detach().requires_grad_(self.requires_grad)
    if isinstance(self, torch.nn.Parameter):
        new = torch.nn.Parameter(new, self.requires_grad)
    vars(new).update(kept)
    torch.utils.swap_tensors(self, new)


def make_wrapper(*args, **kwargs):
    """A nested tensor's shell on the device of its values."""
    return MAKE_WRAPPER(*map(as_meta, args), **{k: as_meta(x) for k, x in kwargs.items()})


class NoStream:
    """A stream of a GPU that is never behind."""

    def __init__(self, *_):
        pass

    def wait_stream(self, other):
        pass


REPLACED = {
    "torch.cuda._lazy_init": (lambda: None, "C++ calls it where Python code names a device"),
    "torch.cuda.current_device": (lambda: CUDA, "a number needs a driver to become a device"),
    "torch.cuda.current_stream": (NoStream, "Megatron-Core's DDP waits for it"),
    "torch.cuda.default_stream": (NoStream, "Megatron-Core's DDP waits for it"),
    "torch.cuda.stream": (nullcontext, "Megatron-Core's DDP switches to it"),
    "torch.cuda.synchronize": (lambda *_: None, "pipeline stages wait for it after a message"),
    "torch.cuda.get_device_capability": (lambda *_: (9, 0), "a broadcast asks for it"),
    "torch.cuda.get_rng_state": (
        lambda *_, **__: GENERATOR.get_state(),
        "Megatron-Core keeps states",
    ),
    "torch.cuda.random.get_rng_state": (
        lambda *_, **__: GENERATOR.get_state(),
        "the same, by another name",
    ),
    "torch.cuda.manual_seed": (GENERATOR.manual_seed, "Megatron-Core seeds a GPU"),
    "torch.cuda.manual_seed_all": (GENERATOR.manual_seed, "torch.manual_seed seeds GPUs too"),
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": (
        lambda state, *_, **__: GENERATOR.set_state(state),
        "it reaches into the driver's generators",
    ),
    "torch.compile": (
        lambda function=None, **_: function or (lambda inner: inner),
        "verl compiles one product in its entropy, for a GPU",
    ),
    "torch.Tensor._make_wrapper_subclass": (make_wrapper, "nested tensors are made with it"),
}
"""Dotted name: (replacement, why it is asked for)."""


@contextmanager
def pretend_cuda(one_gpu=False):
    """Within it, "cuda" is a device.

    Collectives run on the process group that there is. They raise for what the real one lacks:
    NCCL, or with `one_gpu` gloo, as `cpnorm.ranks.backend` has it for ranks that share a GPU.
    """
    nested_tensor._nt_view_dummy()  # made once in a process, and not as one of ours
    with ExitStack() as stack:
        for name, (replacement, _) in REPLACED.items():
            stack.enter_context(mock.patch(name, replacement))
        for name in ("device", "is_cuda", "is_cpu", "is_meta"):
            of_values = property(lambda self, name=name: getattr(self._values, name))
            cls = nested_tensor.NestedTensor
            stack.enter_context(mock.patch.object(cls, name, of_values, create=True))
        stack.enter_context(Names())
        stack.enter_context(Operations(one_gpu))
        yield
