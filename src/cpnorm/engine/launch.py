"""What a launch for each case costs, beside a case in a world that is there.

Under `torchrun` this module runs one dense case on 4 ranks: each rank a fresh Python that imports
torch, Megatron-Core and verl, joins the others, and ends.
"""

import statistics
import subprocess
import sys
import time

from cpnorm import engine
from cpnorm.engine.sweep import cases
from cpnorm.ranks import World

SIZE = 4
LAUNCHES = 3
WARM = 15  # runs in the world, after a first that is not counted
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}")


def job():
    """The sweep's first dense case with two replicas of two context-parallel ranks."""
    return next(j for j in cases() if j.case.dp == j.case.cp == 2 and j.size == SIZE)


def measure() -> dict:
    """Median seconds of a `launch` by torchrun and of a `warm` run of the same case, and their
    `ratio`."""
    command = [sys.executable, *TORCHRUN, "-m", "cpnorm.engine.launch"]
    launches = [
        _seconds(lambda: subprocess.run(command, check=True, capture_output=True))
        for _ in range(LAUNCHES)
    ]
    with World(SIZE) as world:
        warm = [_seconds(lambda: engine.run(world, *job())) for _ in range(1 + WARM)][1:]
    launch, warm = statistics.median(launches), statistics.median(warm)
    medians = {"launch": round(launch, 2), "warm": round(warm, 3), "ratio": round(launch / warm, 1)}
    return {"ranks": SIZE, **medians}


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    engine.run(World(SIZE), *job())
