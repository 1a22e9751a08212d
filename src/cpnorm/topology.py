"""Megatron's parallel state in a rank's function, set up and taken down."""

from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

_groups = {}  # gloo groups of this rank by their members, kept from one topology to the next
_stale = set()  # groups of a topology that an exception ended: a peer may still wait in them


def _shared(create_group):
    """`create_group`, but one group for all calls that list the same ranks."""

    def create(ranks, **_):
        members = tuple(ranks)
        if members not in _groups:
            _groups[members] = create_group(list(ranks))
        return _groups[members]

    return create


@contextmanager
def topology(dp=1, cp=1, tp=1, pp=1, vpp=None):
    """Megatron's parallel state for these sizes, in a rank's function, taken down on the way out.

    `parallel_state.destroy_model_parallel` forgets its process groups; here they are destroyed,
    with every other group made inside, and the default group stays. Not so with gloo, which opens
    sockets and threads for each group: there Megatron's groups with the same members are one group,
    and it is kept for the next topology. After an exception all of them go, with the next topology.

    `ValueError` unless dp * cp * tp * pp is the world's size.
    """
    from megatron.core import parallel_state

    size = dist.get_world_size()
    if dp * cp * tp * pp != size:
        raise ValueError(
            f"topology dp={dp} cp={cp} tp={tp} pp={pp} needs {dp * cp * tp * pp} ranks, "
            f"and the world has {size}"
        )
    groups, create = dist.distributed_c10d._world.pg_map, parallel_state.create_group
    if dist.get_backend() == "gloo":
        create = _shared(create)
    kept = _stale.union(_groups.values()) - {dist.GroupMember.NON_GROUP_MEMBER}
    if not kept <= set(groups):  # their world is gone
        _stale.clear()
        _groups.clear()
    if _stale:
        _destroy(_stale)
    before = set(groups)
    try:
        with mock.patch.object(parallel_state, "create_group", create):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp,
                context_parallel_size=cp,
                create_gloo_process_groups=False,
            )
        yield
        _destroy(set(groups) - before - set(_groups.values()))
    except BaseException:
        _stale.update(set(groups) - before, set(groups) & set(_groups.values()))
        _groups.clear()
        raise
    finally:
        parallel_state.destroy_model_parallel()


def _destroy(groups):
    dist.barrier()  # a slower rank may still read from this one
    while groups:
        dist.destroy_process_group(groups.pop())
