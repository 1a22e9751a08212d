"""The checks on a GPU: verl's losses rank by rank, and verl's engine, over CP sizes and dtypes.

`python -m cpnorm.gpu FOLDER` writes their record where there is a GPU. Where there is none it says
so and writes nothing.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from cpnorm import engine, oracle
from cpnorm.case import DTYPES, Case, Sequence
from cpnorm.evidence import provenance
from cpnorm.ranks import World
from cpnorm.transformer import Model

CP_SIZES = (1, 2, 4, 8)
CASE = Case(
    sequences=(
        Sequence(3, 5),
        Sequence(4, 9, (1, 1, 1, 0, 0, 1, 1, 0, 1)),
        Sequence(6, 21),
        Sequence(2, 7, (0,) * 7),
    ),
    clip_low=0.05,
    clip_high=0.1,
)
FILE = "gpu.json"
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def measure(device: str = "cuda") -> dict:
    """Run everything on `device`; what came out, with where.

    `losses` has for each loss, CP size and dtype the largest error of `check.check` and the largest
    gradient on another rank's rows, `engine` for each CP size and dtype T/K as predicted and
    measured, and the residual against the oracle; float64 without Megatron's float32 steps.
    """
    from cpnorm import check  # verl and Megatron-Core, which take seconds to import
    from cpnorm.engine.model import attention

    cases = [replace(CASE, cp=cp, dtype=dtype) for cp in CP_SIZES for dtype in DTYPES]
    found = {"provenance": provenance(), "device": about(device), "losses": [], "engine": []}
    for case in tqdm(cases, unit="case", leave=False, desc="losses"):
        for loss in oracle.LOSSES:
            one = check.check(replace(case, loss=loss), device=device)
            where = {"loss": loss, "cp": case.cp, "dtype": case.dtype}
            found["losses"].append(where | {"error": one.error, "off_shard": one.off_shard})
    for cp in tqdm(CP_SIZES, unit="world", leave=False, desc="engine"):
        with World(cp, device) as world:
            for case in (one for one in cases if one.cp == cp):
                J, gradient = oracle.gradient(case, Model())
                step = engine.run(world, case, exact=case.dtype == "float64")
                agreement = engine.compare(step, gradient, float(J))
                found["engine"].append(
                    {
                        "cp": cp,
                        "dtype": case.dtype,
                        "backend": world.backend,
                        "attention": attention(case, device).__name__,
                        "predicted": step.predicted(cp),
                        "ratio": agreement.ratio,
                        "residual": agreement.residual,
                    }
                )
    return found


def about(device: str) -> dict:
    """Name, number, memory in GiB and driver of the GPUs; the name alone for another device."""
    if device != "cuda":
        return {"name": device}
    one = torch.cuda.get_device_properties(0)
    return {
        "name": one.name,
        "count": torch.cuda.device_count(),
        "memory": round(one.total_memory / 2**30),
        "cuda": torch.version.cuda,
        "driver": subprocess.check_output(DRIVER, text=True).split()[0],
    }


def record(folder: Path) -> dict | None:
    """A live run where there is a GPU, else the record in `folder`, else None."""
    if torch.cuda.is_available():
        return measure()
    path = Path(folder, FILE)
    return json.loads(path.read_text()) if path.is_file() else None


def main(folder: str) -> None:
    """Write the record of a run on the GPU at hand into `folder`."""
    if not torch.cuda.is_available():
        print(f"no GPU here: {FILE} is not written")
        return
    path = Path(folder, FILE)
    whole = json.dumps(measure(), indent=1)
    path.write_text(whole + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1])
