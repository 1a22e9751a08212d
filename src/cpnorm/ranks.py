"""A world of processes, started once, that runs one function after another.

On CPU the ranks are forked from one process that has imported torch, Megatron-Core and verl
(`rank_imports`), so that this is paid for once and its memory is shared. On CUDA they are spawned.
"""

import atexit
import faulthandler
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

PRELOAD = ["cpnorm.rank_imports"]
GRACE = 0.5  # s between the first failure and the end of the others: time to report theirs
DUMP = 5.0  # s that a hung rank gets to write its stack


class RankError(RuntimeError):
    """A rank of a `World` raised, ended, or did not finish in time.

    `rank` is that rank (the first that failed), `case` the call as text, `what` happened, and
    `traceback` its Python stack; for ranks that hung, the stack of each.
    """

    def __init__(self, rank, case, what, traceback):
        super().__init__(rank, case, what, traceback)
        self.rank, self.case, self.what, self.traceback = rank, case, what, traceback

    def __str__(self):
        return f"rank {self.rank} {self.what}, in {self.case}\n{self.traceback}".rstrip()


class World:
    """`size` processes that run one function after another; also a context manager.

    `device` is "cpu" (gloo) or "cuda" (NCCL where each rank has a GPU of its own, gloo where ranks
    share one). Under `torchrun` the ranks are those it started: `size` has to be theirs, every one
    of them makes the same calls, and `timeout` is the process group's.

    A fault in a rank ends the world. It also ends with `close`, when it is collected, and with the
    process that made it, however that ends.

    `ValueError` for a size or a device that cannot be had, `RankError` when a rank does not start
    within `timeout` seconds.
    """

    def __init__(self, size, device="cpu", timeout=120.0):
        if device not in ("cpu", "cuda"):
            raise ValueError(f'device is "cpu" or "cuda", not {device!r}')
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError('device "cuda": torch sees no GPU')
        self.size, self.device, self.timeout = size, device, timeout
        self._ranks, self._closed = [], False
        self._end = weakref.finalize(self, _end, self._ranks)
        if dist.is_torchelastic_launched():
            self.backend = _join_torchrun(size, device, timeout)
            return
        self.backend = backend(device, size)
        context = get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu":
            context.set_forkserver_preload(PRELOAD)
        try:
            # Rank 0 serves the store on a port that the system chose, open from here on.
            with socket.create_server(("127.0.0.1", 0)) as listener:
                for rank in range(size):
                    self._ranks.append(_start(context, rank, size, device, listener))
            self._collect("the start of the world", timeout)
        except BaseException:
            self.close()
            raise

    def run(self, function, *args, timeout=None) -> list:
        """`function(*args)` on every rank, the default process group ready; results in rank order.

        Function, arguments and results travel by value, pickled, tensors to the CPU; the function
        lives in a module that a rank can import. `timeout` is in seconds, by default the world's.

        `TypeError` when function or arguments cannot be pickled, `RuntimeError` when the world is
        closed, `RankError` when a rank fails.
        """
        if self._closed:
            raise RuntimeError("this World is closed: start another one")
        case = f"{getattr(function, '__qualname__', function)}({', '.join(map(repr, args))})"
        if dist.is_torchelastic_launched():
            return _run_here(function, args, case)
        try:
            job = _pack((function, args))
            if getattr(function, "__module__", None) == "__main__":
                raise TypeError("the ranks do not import __main__, put it into a module")
        except Exception as error:
            raise TypeError(f"{case} cannot be sent to the ranks: {error}") from error
        try:
            for rank in self._ranks:
                with suppress(OSError):  # a rank that is dead is found below
                    rank.pipe.send_bytes(job)
            return self._collect(case, self.timeout if timeout is None else timeout)
        except BaseException:
            self.close()
            raise

    def close(self):
        """End every rank. Nothing happens the second time."""
        self._closed = True
        self._end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _collect(self, case, timeout):
        """The results of all ranks, in order; `RankError` when one is not to be had."""
        results, failures, pending = {}, {}, dict(enumerate(self._ranks))
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            wait([x for rank in pending.values() for x in (rank.pipe, rank.process.sentinel)], left)
            for i, rank in list(pending.items()):
                report = _report(rank)
                if report is None:
                    continue
                del pending[i]
                if report[0] is None:
                    results[i] = report[1]
                else:
                    failures[i] = report
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            first = min(failures, key=lambda i: failures[i][0])
            _, what, traceback = failures.pop(first)
            also = [f"; rank {i} {failure[1]} after it" for i, failure in failures.items()]
            also += [f"; rank {i} had not finished" for i in pending]
            raise RankError(first, case, what + "".join(also), traceback)
        if pending:
            raise _hung(case, timeout, pending)
        return [results[i] for i in range(len(self._ranks))]


class _Rank(NamedTuple):
    process: BaseProcess
    pipe: Connection  # jobs out, reports in
    stack: Connection  # where it writes its stack when it is told to


def backend(device, ranks):
    """ "nccl" where each of this machine's `ranks` has a GPU of its own, else "gloo"."""
    return "nccl" if device == "cuda" and torch.cuda.device_count() >= ranks else "gloo"


def _start(context, rank, size, device, listener):
    pipe, its_pipe = context.Pipe()
    stack, its_stack = context.Pipe(duplex=False)
    port = listener.getsockname()[1]
    process = context.Process(
        target=_serve,
        args=(rank, size, device, port, listener if rank == 0 else None, its_pipe, its_stack),
        name=f"rank {rank}",
        daemon=True,
    )
    # A rank would run the main script again: it gets an empty one to look at.
    with its_pipe, its_stack, mock.patch.dict(sys.modules, __main__=ModuleType("__main__")):
        process.start()
    return _Rank(process, pipe, stack)


def _serve(rank, size, device, port, listener, pipe, stack):
    """The life of a rank: join the others, then a job and a report in turn."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C
    # chain: after the stack, what SIGUSR1 does by default, which is to end the process
    faulthandler.register(signal.SIGUSR1, stack.fileno(), all_threads=True, chain=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):  # until the parent has gone
        pipe.send_bytes(_attempt(_join, rank, size, device, port, listener))
        while True:
            pipe.send_bytes(_attempt(_call, pipe.recv_bytes()))


def _pack(x):
    """Pickled, with tensors as torch stores them.

    Not plain pickle: megatron-core 0.19 has it load tensors with a function of its own, so that
    whoever reads a rank's tensor would import Megatron.
    """
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()  # not getbuffer: collecting it crashes Python 3.12.1


def _unpack(data):
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _end_with_parent():
    parent_process().join()
    os._exit(1)


def _call(job):
    function, args = _unpack(job)
    return function(*args)


def _attempt(function, *args):
    """A pickled report: (None, result), or (time, what happened, traceback)."""
    try:
        return _pack((None, function(*args)))
    except BaseException as error:
        return _pack((time.monotonic(), f"raised {type(error).__name__}", traceback.format_exc()))


def _join(rank, size, device, port, listener):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    # Every name of this machine resolves to the loopback device, which all ranks share.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    _prepare(device, rank)
    if device == "cuda":
        from . import rank_imports  # noqa: F401
    else:
        _pin(rank, size)
    serve = {"is_master": True, "master_listen_fd": listener.detach()} if listener else {}
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, **serve)
    dist.init_process_group(backend(device, size), store=store, rank=rank, world_size=size)
    dist.barrier()


def _prepare(device, local_rank):
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks for it with TP and CP
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def _pin(rank, size):
    """With two ranks a core or more, this rank stays on one, two neighbours on the same.

    Neighbours are a TP group. They exchange small messages all the time, and to wake another core
    for each takes longer than to take turns on one.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return
    cores = sorted(os.sched_getaffinity(0))
    if size >= 2 * len(cores):
        os.sched_setaffinity(0, {cores[rank // 2 % len(cores)]})


def _report(rank):
    """What a rank has to say: None as yet, or a report as `_attempt` makes it. Its death is one."""
    try:
        if rank.pipe.poll():
            report = rank.pipe.recv_bytes()
        elif rank.process.exitcode is None:
            return None
        else:
            raise EOFError
    except (EOFError, OSError):
        rank.process.join(DUMP)
        code = rank.process.exitcode
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return 0.0, ended, ""  # time 0: a peer's death is why the others raise
    try:
        return _unpack(report)
    except Exception:
        return time.monotonic(), "returned what cannot be unpickled", traceback.format_exc()


def _hung(case, timeout, pending):
    """The error for ranks that have not finished: each writes its stack, and with that ends."""
    for rank in pending.values():
        with suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    deadline, stacks = time.monotonic() + DUMP, []
    for i, rank in pending.items():
        rank.process.join(max(0.0, deadline - time.monotonic()))
        written = b""
        while rank.stack.poll() and (chunk := os.read(rank.stack.fileno(), 1 << 16)):
            written += chunk
        stacks.append(f"rank {i}:\n{written.decode() or 'gave no stack'}")
    first, *others = pending
    also = f" (nor did {', '.join(f'rank {i}' for i in others)})" if others else ""
    return RankError(first, case, f"did not finish in {timeout:g} s{also}", "\n".join(stacks))


def _end(ranks):
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.pipe.close()
        rank.stack.close()
    ranks.clear()


def _join_torchrun(size, device, timeout):
    given = int(os.environ["WORLD_SIZE"])
    if size != given:
        raise ValueError(f"torchrun started {given} ranks, and this World is to have {size}")
    name = backend(device, int(os.environ["LOCAL_WORLD_SIZE"]))
    if not dist.is_initialized():
        _prepare(device, int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(name, timeout=timedelta(seconds=timeout))
        atexit.register(dist.destroy_process_group)
    return name


def _run_here(function, args, case):
    try:
        result = function(*args)
    except Exception as error:
        what = f"raised {type(error).__name__}"
        raise RankError(dist.get_rank(), case, what, traceback.format_exc()) from error
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    return results
