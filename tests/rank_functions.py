"""What the ranks of test_ranks.py run. Light to import: every rank does."""

import os
import signal
import threading
import warnings

import psutil
import torch
import torch.distributed as dist

from cpnorm.topology import topology


def add_rank(x):
    """Sum over ranks of x + rank."""
    x = x + dist.get_rank()
    dist.all_reduce(x)
    return x


def setting():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_DEVICE_MAX_CONNECTIONS")
    environment = [os.environ[name] for name in names]
    return environment, torch.get_num_threads(), dist.get_backend(), os.sched_getaffinity(0)


def large(elements):
    return torch.full((elements,), float(dist.get_rank()), dtype=torch.float64)


def listening():
    """Addresses at which this rank takes connections."""
    connections = psutil.Process().net_connections(kind="inet")
    return [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]


def handles():
    me = psutil.Process()
    return me.num_fds(), me.num_threads()


def place(dp, cp, tp, pp, vpp=None):
    """Coordinates of this rank as Megatron has them, and the members of its groups."""
    from megatron.core import parallel_state as mpu

    with topology(dp, cp, tp, pp, vpp):
        groups = [
            mpu.get_data_parallel_group(),
            mpu.get_context_parallel_group(),
            mpu.get_tensor_model_parallel_group(),
            mpu.get_pipeline_model_parallel_group(),
            mpu.get_data_parallel_group(with_context_parallel=True),
        ]
        for group in groups:
            x = torch.ones(())
            dist.all_reduce(x, group=group)
            assert x == group.size()
        return [group.rank() for group in groups], [
            dist.get_process_group_ranks(group) for group in groups
        ]


def refusal(*sizes):
    try:
        with topology(*sizes):
            return None
    except ValueError as error:
        return str(error)


def change(times, *topologies):
    for i in range(times):
        with topology(*topologies[i % len(topologies)]):
            dist.new_group([0, 1])
    return handles()


def raise_inside(times, *sizes):
    """Every rank leaves a topology by an exception, `times` times."""
    from megatron.core import parallel_state as mpu

    for _ in range(times):
        try:
            with topology(*sizes):
                dist.new_group([0, 1])
                raise KeyError("inside")
        except KeyError:
            assert not mpu.model_parallel_is_initialized()
    return handles()


def fail(how, culprits=(1,)):
    """Ranks in `culprits` fail; the others wait for them."""
    if dist.get_rank() not in culprits:
        return dist.barrier()
    if how == "raise":
        raise LookupError("no such token")
    if how == "exit":
        os._exit(7)
    if how == "leave":
        raise SystemExit(3)
    os.kill(os.getpid(), how)


def fail_inside_topology():
    """Rank 1 raises; the others wait for it in a group that it leaves."""
    from megatron.core import parallel_state as mpu

    with topology(cp=dist.get_world_size()):
        if dist.get_rank() == 1:
            raise LookupError("no such token")
        dist.all_reduce(torch.ones(()), group=mpu.get_context_parallel_group())


def hang(culprits=(1,)):
    if dist.get_rank() in culprits:
        print("hangs", flush=True)
        threading.Event().wait()


def spin():
    while dist.get_rank() == 1:
        pass


def stop():
    """Rank 1 is stopped, so that it cannot even write its stack."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def no_pickle():
    return threading.Lock()


class OneWay:
    def __reduce__(self):
        return (int, ("not a number",))


def one_way():
    return OneWay()


def noise():
    warnings.warn("a library complains", stacklevel=1)
