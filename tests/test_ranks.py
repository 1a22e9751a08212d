"""Ranks that compute, and ranks that fail: the caller learns why and nothing is left behind."""

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import rank_functions
from cpnorm import ranks
from cpnorm.ranks import RankError, World

pytestmark = pytest.mark.timeout(120)
SOON = 10.0  # s, in which a fault has to reach the caller


@pytest.fixture(scope="module")
def world():
    with World(4) as world:
        yield world


def descendants():
    """Ranks of this process; the process that they are forked from and the tracker stay."""
    return {p for child in psutil.Process().children() for p in child.children(recursive=True)}


@pytest.fixture
def nothing_left(world):
    """No rank and no file descriptor of the worlds started inside; `world` is an older one."""
    before = descendants(), psutil.Process().num_fds()
    yield
    gc.collect()
    assert (descendants(), psutil.Process().num_fds()) == before


def test_results_come_in_rank_order(world):
    for x in (torch.zeros(3), torch.ones(2, 2)):
        results = world.run(rank_functions.add_rank, x)
        assert all(torch.equal(result, 4 * x + 6) for result in results)


def test_setting_of_a_rank(world):
    mine = sorted(os.sched_getaffinity(0))
    for rank, (names, threads, backend, cores) in enumerate(world.run(rank_functions.setting)):
        assert names == [str(rank), "4", str(rank), "1"]
        assert (threads, backend) == (1, "gloo")
        assert cores == ({mine[rank // 2 % len(mine)]} if len(mine) <= 2 else set(mine))
    assert "RANK" not in os.environ


def test_large_results_and_arguments_travel_by_value(world):
    elements = 3_000_000  # 24 MB a rank, many times what a pipe holds
    world.run(rank_functions.add_rank, torch.zeros(1))
    before = psutil.Process().num_fds(), sorted(os.listdir("/dev/shm"))
    handles = world.run(rank_functions.handles)
    for _ in range(2):
        for rank, result in enumerate(world.run(rank_functions.large, elements)):
            assert torch.equal(result, torch.full((elements,), float(rank), dtype=torch.float64))
        world.run(rank_functions.add_rank, torch.zeros(elements))
    assert world.run(rank_functions.handles) == handles
    assert (psutil.Process().num_fds(), sorted(os.listdir("/dev/shm"))) == before


SIZES = [
    (dp, cp, tp, 4 // (dp * cp * tp))
    for dp in (1, 2, 4)
    for cp in (1, 2, 4)
    for tp in (1, 2, 4)
    if 4 % (dp * cp * tp) == 0
]


@given(st.sampled_from(SIZES))
def test_topology_places_ranks(world, sizes):
    """Megatron's order: TP fastest, then CP, DP, PP."""
    dp, cp, tp, pp = sizes
    grid = torch.arange(4).view(pp, dp, cp, tp)
    for rank, (coordinates, members) in enumerate(world.run(rank_functions.place, *sizes)):
        p, d, c, t = (int(i[0]) for i in torch.where(grid == rank))
        assert coordinates == [d, c, t, p, d * cp + c]
        lines = [grid[p, :, c, t], grid[p, d, :, t], grid[p, d, c, :], grid[:, d, c, t]]
        assert members == [line.tolist() for line in (*lines, grid[p, :, :, t].flatten())]


def test_interleaved_topology(world):
    assert world.run(rank_functions.place, 1, 1, 1, 4, 2)[3][0] == [0, 0, 0, 3, 0]


@given(st.tuples(*[st.integers(0, 5)] * 4))
def test_topology_of_another_size_is_refused(world, sizes):
    dp, cp, tp, pp = sizes
    assume(dp * cp * tp * pp != 4)
    message = f"topology dp={dp} cp={cp} tp={tp} pp={pp} needs {dp * cp * tp * pp} ranks, "
    assert world.run(rank_functions.refusal, *sizes) == [message + "and the world has 4"] * 4


def growth(before, after):
    """Largest increase of file descriptors or threads on any rank. gloo closes them in its own
    time, so that what is left is compared with what one a round would leave."""
    pairs = zip(before, after, strict=True)
    return max(later - first for both in pairs for first, later in zip(*both, strict=True))


def test_topologies_leave_nothing(world):
    first = world.run(rank_functions.change, len(SIZES), *SIZES)
    assert growth(first, world.run(rank_functions.change, 200, *SIZES)) < 200


def test_exception_inside_a_topology_leaves_nothing(world):
    first = world.run(rank_functions.raise_inside, 2, 2, 2, 1, 1)
    assert growth(first, world.run(rank_functions.raise_inside, 50, 2, 2, 1, 1)) < 50
    assert world.run(rank_functions.place, 2, 2, 1, 1)[3][0][:2] == [1, 1]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("raise", "raised LookupError"),
        ("leave", "raised SystemExit"),
        ("exit", "exited with 7"),
        (signal.SIGKILL, "was ended by SIGKILL"),
        (signal.SIGSEGV, "was ended by SIGSEGV"),
    ],
)
def test_failed_rank_is_named(how, what):
    world, start = World(3), time.monotonic()
    with pytest.raises(RankError) as caught:
        world.run(rank_functions.fail, how)
    error = caught.value
    assert time.monotonic() - start < SOON
    assert error.rank == 1
    assert error.what.startswith(what)
    assert error.case == f"fail({how!r})"
    assert str(error).startswith(f"rank 1 {what}")
    assert error.case in str(error)
    if what.startswith("raised"):
        assert 'rank_functions.py", line' in error.traceback
        assert "rank 0 had not finished" in error.what
    with pytest.raises(RuntimeError, match=r"^this World is closed: start another one$"):
        world.run(os.getpid)
    with World(3) as another:
        assert len(another.run(os.getpid)) == 3


@pytest.mark.usefixtures("nothing_left")
def test_several_failures_are_one_error():
    with World(3) as world, pytest.raises(RankError) as caught:
        world.run(rank_functions.fail, "raise", (0, 2))
    assert caught.value.rank in (0, 2)
    assert f"rank {2 - caught.value.rank} raised LookupError after it" in caught.value.what
    assert "rank 1 had not finished" in caught.value.what


@pytest.mark.usefixtures("nothing_left")
def test_cause_is_named_not_its_victim():
    with World(2) as world, pytest.raises(RankError, match="no such token") as caught:
        world.run(rank_functions.fail_inside_topology)
    assert caught.value.rank == 1
    assert "rank 0 had not finished" in caught.value.what


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("function", ["hang", "spin"])
def test_hung_rank_shows_its_stack(function):
    with World(3) as world, pytest.raises(RankError) as caught:
        world.run(getattr(rank_functions, function), timeout=0.5)
    assert caught.value.rank == 1
    assert caught.value.what == "did not finish in 0.5 s"
    assert f"in {function}\n" in caught.value.traceback
    assert "rank 0" not in str(caught.value)


@pytest.mark.usefixtures("nothing_left")
def test_every_hung_rank_shows_its_stack():
    with World(3) as world, pytest.raises(RankError) as caught:
        world.run(rank_functions.hang, (0, 2), timeout=0.5)
    assert caught.value.what == "did not finish in 0.5 s (nor did rank 2)"
    assert caught.value.traceback.count("in hang\n") == 2


@pytest.mark.usefixtures("nothing_left")
def test_stopped_rank_is_ended(monkeypatch):
    monkeypatch.setattr(ranks, "DUMP", 0.5)
    with World(2) as world, pytest.raises(RankError, match="rank 1:\ngave no stack"):
        world.run(rank_functions.stop, timeout=0.5)


@pytest.mark.usefixtures("nothing_left")
def test_rank_that_dies_between_runs():
    with World(2) as world:
        victim = psutil.Process(world.run(os.getpid)[1])
        victim.kill()
        with pytest.raises(RankError, match="rank 1 was ended by SIGKILL"):
            world.run(rank_functions.add_rank, torch.zeros(1))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("function", "message"),
    [("no_pickle", "cannot pickle '_thread.lock' object"), ("one_way", "returned what cannot be")],
)
def test_result_that_cannot_travel(function, message):
    with World(2) as world, pytest.raises(RankError, match=message):
        world.run(getattr(rank_functions, function))


def test_function_that_cannot_travel(world):
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        world.run(lambda: None)
    with pytest.raises(TypeError, match=r"cannot be sent to the ranks.*lock"):
        world.run(rank_functions.add_rank, threading.Lock())
    assert len(world.run(os.getpid)) == 4


def test_function_of_the_main_script(world, monkeypatch):
    monkeypatch.setattr(rank_functions.noise, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "noise", rank_functions.noise, raising=False)
    with pytest.raises(TypeError, match="put it into a module"):
        world.run(rank_functions.noise)


@pytest.mark.usefixtures("nothing_left")
def test_two_worlds_side_by_side():
    with World(2) as a, World(3) as b:
        ports = [p for world in (a, b) for r in world.run(rank_functions.listening) for p in r]
        assert len(set(ports)) == len(ports) > 0
        assert {host for host, _ in ports} == {"127.0.0.1"}
        for _ in range(2):
            assert a.run(rank_functions.add_rank, torch.zeros(1)) == [torch.ones(1)] * 2
            assert b.run(rank_functions.add_rank, torch.zeros(1)) == [3 * torch.ones(1)] * 3
    for address in ports:
        with socket.socket() as client:
            assert client.connect_ex(address) != 0


@pytest.mark.usefixtures("nothing_left")
def test_end_of_a_world():
    world = World(2)
    world.close()
    world.close()
    world = World(2)
    pids = world.run(os.getpid)
    del world
    gc.collect()
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.usefixtures("nothing_left")
def test_world_that_does_not_start():
    with pytest.raises(RankError, match=r"did not finish in 1e-06 s.*in the start of the world"):
        World(2, timeout=1e-6)


def test_refused_worlds(monkeypatch):
    with pytest.raises(ValueError, match='device is "cpu" or "cuda", not \'tpu\''):
        World(2, device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU"):
        World(2, device="cuda")


@given(st.integers(1, 16), st.integers(0, 16))
def test_backend(size, gpus):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        assert ranks.backend("cpu", size) == "gloo"
        assert ranks.backend("cuda", size) == ("nccl" if gpus >= size else "gloo")


def test_eight_ranks_share_their_memory(world):
    with World(8) as eight:
        eight.run(rank_functions.place, 2, 2, 2, 1)
        used = sum(p.memory_full_info().pss for p in psutil.Process().children(recursive=True))
        assert used < 5 * 2**30


SCRIPT = """\
import os, sys
sys.path.insert(0, {tests!r})
import rank_functions
from cpnorm import ranks
if {light}:
    ranks.PRELOAD = ["torch"]
world = ranks.World(2)
print(*world.run(os.getpid), flush=True)
"""


def script(tmp_path, end, light=True):
    """A program, without a main guard, that starts a world, prints the pids, and goes on."""
    path = tmp_path / "program.py"
    text = SCRIPT.format(tests=str(Path(__file__).parent), light=light)
    path.write_text(text + textwrap.dedent(end))
    return subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # multiprocessing's socket outlives a SIGKILL
        start_new_session=True,
        # as in a terminal: a shell's background jobs, and all that they start, ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def communicated(program):
    """What an ended program wrote to stderr. One that does not end in time is killed."""
    try:
        return program.communicate(timeout=SOON)[1]
    except subprocess.TimeoutExpired:
        program.kill()
        raise


def test_program_that_just_ends(tmp_path):
    """No word about packages that are not installed, no rank that stays, no import up here."""
    end = """
    world.run(rank_functions.noise)
    assert len(world.run(rank_functions.large, 2)[1]) == 2
    assert not {"megatron", "verl"} & set(sys.modules)
    """
    with script(tmp_path, end, light=False) as program:
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2
        assert program.communicate() == ("", "")
        assert program.returncode == 0
        assert not any(map(psutil.pid_exists, pids))


def test_ctrl_c_while_the_ranks_wait(tmp_path):
    """The program alone says so: a rank that waits for its next job does not show a traceback."""
    end = """
    import threading
    print("waits", flush=True)
    threading.Event().wait()
    """
    with script(tmp_path, end) as program:
        assert program.stdout.readline()
        assert program.stdout.readline() == "waits\n"
        processes = psutil.Process(program.pid).children(recursive=True)
        os.killpg(program.pid, signal.SIGINT)
        noise = communicated(program)
        assert noise.count("KeyboardInterrupt") == noise.count("Traceback") == 1, noise
        assert not psutil.wait_procs(processes, timeout=SOON)[1]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_program_that_is_ended(tmp_path, how):
    """Ctrl-C reaches every process of a terminal, the other signals only the program."""
    with script(tmp_path, "world.run(rank_functions.hang)") as program:
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert program.stdout.readline() == "hangs\n"
        processes = psutil.Process(program.pid).children(recursive=True)
        assert set(pids) < {p.pid for p in processes}
        if how == signal.SIGINT:
            os.killpg(program.pid, how)
        else:
            program.send_signal(how)
        noise = communicated(program)
        assert program.returncode == -how
        assert noise.count("Traceback") == (how == signal.SIGINT), noise
        assert not psutil.wait_procs(processes, timeout=SOON)[1]


TORCHRUN = """\
import os, sys
sys.path.insert(0, {tests!r})
import rank_functions, torch
from cpnorm import ranks
with ranks.World(2) as world:
    results = world.run(rank_functions.add_rank, torch.zeros(1))
with ranks.World(2) as world:
    assert world.run(os.getpid)[int(os.environ["RANK"])] == os.getpid()
    try:
        world.run(rank_functions.fail, "raise", (0, 1))
    except ranks.RankError as error:
        fault = str(error).splitlines()[0]
with open(sys.argv[1] + os.environ["RANK"], "w") as said:
    print([r.item() for r in results], fault, file=said)
"""


def test_torchrun(tmp_path):
    """Without Megatron-Core; test_own_run.py has a topology under torchrun."""
    path = tmp_path / "program.py"
    path.write_text(TORCHRUN.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*command, path, tmp_path / "rank"],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        said = (tmp_path / f"rank{rank}").read_text()
        assert said == f"[1.0, 1.0] rank {rank} raised LookupError, in fail('raise', (0, 1))\n"


def test_torchrun_of_another_size(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"^torchrun started 2 ranks, .* is to have 3$"):
        World(3)
