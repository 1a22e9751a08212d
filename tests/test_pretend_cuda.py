"""The code meant for a GPU on tensors that say they are on one, see `pretend_cuda`."""

import pkgutil
from dataclasses import replace

import pytest
import torch

import pretend_cuda as tool
from cpnorm import check
from cpnorm.case import Case, Sequence
from cpnorm.ranks import RankError, World
from cpnorm.transformer import Model
from engine_functions import attention_on_rank, step_on_both_devices
from pretend_cuda import Pretend, pretend_cuda

CASE = Case(
    sequences=(Sequence(3, 5), Sequence(4, 9, (1, 1, 1, 0, 0, 1, 1, 0, 1))),
    clip_low=0.05,
    clip_high=0.1,
)
DENSE, MOE = Model(layers=1), Model(layers=1, experts=4)


@pytest.fixture
def cuda():
    with pretend_cuda():
        yield "cuda"


def test_every_way_onto_the_device(cuda):
    made = [
        torch.zeros(2, device=cuda),
        torch.tensor([0.0, 0.0], device=cuda),
        torch.zeros(2).to(cuda),
        torch.zeros(2).to(device="cuda:0"),
        torch.zeros(2).to(torch.cuda.current_device()),
        torch.zeros(2).cuda(),
    ]
    for x in made:
        assert x.is_cuda
        assert x.device == torch.device("cuda:0")
        assert x.tolist() == [0, 0]
        assert x.to(cuda) is x
        assert type(x.cpu()) is torch.Tensor
    assert not torch.zeros(2).is_cuda


MIXED = {
    "sum": lambda x, y: x + y,
    "in place": lambda x, y: y.add_(x),
    "in place, no dimension": lambda x, y: torch.tensor(0.0).add_(x.sum()),
    "product": lambda x, y: x @ y,
    "list": lambda x, y: torch.cat([x, y]),
    "choice": lambda x, y: torch.where(y > 0, x, x),
    "search": torch.searchsorted,
    "index on the GPU": lambda x, y: y[x.long()],
    "value of another device": lambda x, y: x.index_put_((y.long(),), y),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_raise(cuda, name):
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](torch.ones(2, device=cuda), torch.ones(2))


def test_what_torch_lets_mix(cuda):
    x = torch.arange(3.0, device=cuda)
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4]
    assert x[torch.tensor([2, 0])].tolist() == [2, 0]
    assert x.copy_(torch.ones(3)).is_cuda
    assert x.tolist() == [1, 1, 1]
    assert not torch.zeros(3).copy_(x).is_cuda
    x[1:] = 5
    assert x.tolist() == [1, 5, 5]
    assert (x[1].item(), float(x[1]), x[1] > 4) == (5, 5, True)


def test_numpy_needs_the_cpu(cuda):
    x = torch.ones(2, device=cuda)
    with pytest.raises(TypeError, match="to numpy"):
        x.numpy()
    assert x.cpu().numpy().tolist() == [1, 1]


def test_backward_stays_on_its_devices(cuda):
    x = torch.ones(3, requires_grad=True)
    y = torch.full((3,), 2.0, device=cuda, requires_grad=True)
    (x.to(cuda) * y).sum().cpu().backward()
    assert type(x.grad) is torch.Tensor
    assert isinstance(y.grad, Pretend)
    assert (x.grad.tolist(), y.grad.tolist()) == ([2, 2, 2], [1, 1, 1])


def test_nested_tensors(cuda):
    parts = [torch.ones(2), torch.ones(3)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged).to(cuda)
    assert nested.is_cuda
    assert nested.to(cuda) is nested
    assert (nested * 2).values().tolist() == [2] * 5
    assert nested.offsets().tolist() == [0, 2, 5]
    values = torch.ones(5, device=cuda, requires_grad=True)
    nested = torch.nested.nested_tensor_from_jagged(values, nested.offsets())
    (nested * nested).values().sum().backward()
    assert values.grad.tolist() == [2] * 5
    with pytest.raises(AssertionError, match="same device"):
        torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]))


def test_a_module_keeps_its_parameters(cuda):
    module = torch.nn.Linear(2, 3)
    weight = module.weight
    weight.mark = "kept"
    numbers = weight.tolist()
    module.to(cuda, torch.float64)
    assert module.weight is weight
    assert isinstance(weight, torch.nn.Parameter)
    assert (weight.is_cuda, weight.mark, weight.dtype) == (True, "kept", torch.float64)
    assert weight.tolist() == numbers


def test_the_gpu_draws_from_its_own_generator(cuda):
    torch.manual_seed(1)
    first = torch.rand(2, device=cuda).tolist()
    torch.default_generator.manual_seed(1)
    assert torch.rand(2, device=cuda).tolist() != first
    assert torch.rand(2).tolist() == first
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device=cuda, generator=torch.Generator())


def test_memory_without_numbers_is_noticed(cuda):
    assert torch.empty(2, device=cuda).isnan().all()
    with pytest.raises(NotImplementedError, match="list as an index"):
        torch.ones(3, device=cuda)[[0, 2]]


def test_nothing_is_left_behind():
    with pretend_cuda():
        pass
    assert torch.zeros(2).device.type == "cpu"
    assert torch.zeros(2, device="meta").is_meta
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


@pytest.mark.parametrize("name", tool.REPLACED)
def test_every_replaced_name_exists(name):
    assert callable(pkgutil.resolve_name(name))


@pytest.mark.parametrize("loss", ["vanilla", "clip_cov", "bypass_mode"])
def test_check_finds_what_it_finds_on_the_cpu(loss):
    case = replace(CASE, cp=2, loss=loss)
    expected = check.check(case)
    with pretend_cuda():
        assert check.check(case, device="cuda") == expected


@pytest.fixture(scope="module")
def one():
    with World(1, timeout=60) as world:
        yield world


@pytest.fixture(scope="module")
def two():
    with World(2, timeout=60) as world:
        yield world


def test_attention_on_two_ranks(two):
    g = torch.Generator().manual_seed(5)
    shapes = [(24, 4, 8), (24, 2, 8), (24, 2, 8), (24, 32)]
    tensors = [torch.randn(*s, generator=g, dtype=torch.float64) for s in shapes]
    ends = torch.tensor([0, 4, 24], dtype=torch.int32)
    expected = two.run(attention_on_rank, 1, 2, *tensors, ends)
    found = two.run(attention_on_rank, 1, 2, *tensors, ends, "cuda")
    for want, got in zip(expected, found, strict=True):
        for x, y in zip(want, got, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-13, atol=1e-14)


STEPS = {
    "float64": ({}, DENSE, False),
    "float64, exact": ({}, DENSE, True),
    "float32": ({"dtype": "float32"}, DENSE, False),
    "bfloat16": ({"dtype": "bfloat16"}, DENSE, False),
    "experts": ({}, MOE, False),
    "KL and entropy": ({"kl_coef": 0.2, "entropy_coef": 0.3}, DENSE, False),
}


def assert_equal(results):
    for want, got in results:
        assert replace(got, gradients={}) == replace(want, gradients={})
        assert got.gradients.keys() == want.gradients.keys()
        for name, (gradient, _) in got.gradients.items():
            assert type(gradient) is torch.Tensor
            assert torch.equal(gradient, want.gradients[name][0])


@pytest.mark.parametrize("name", ["float64", "float64, exact"])
def test_step_on_one_rank(one, name):
    changes, model, exact = STEPS[name]
    assert_equal(one.run(step_on_both_devices, replace(CASE, **changes), model, exact))


@pytest.mark.parametrize("name", STEPS)
def test_step_on_two_ranks_that_share_a_gpu(two, name):
    changes, model, exact = STEPS[name]
    case = replace(CASE, cp=2, **changes)
    assert_equal(two.run(step_on_both_devices, case, model, exact, "verl", True))


@pytest.mark.parametrize("variant", ["remainder", "two values"])
def test_step_of_a_variant(two, variant):
    case = replace(CASE, cp=2)
    assert_equal(two.run(step_on_both_devices, case, DENSE, False, variant))


@pytest.mark.parametrize("changes", [{"tp": 2}, {"pp": 2}])
def test_step_of_another_topology(two, changes):
    assert_equal(two.run(step_on_both_devices, replace(CASE, **changes), Model()))


def test_stages_cannot_share_a_gpu():
    with World(2, timeout=60) as two, pytest.raises(RankError, match="gloo cannot"):
        two.run(step_on_both_devices, replace(CASE, pp=2), Model(), False, "verl", True)
