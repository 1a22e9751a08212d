"""`python -m cpnorm.engine FOLDER`: run the whole sweep and write its evidence into FOLDER, in a
file named after the installed Megatron-Core."""

import sys
import time
from importlib.metadata import version
from pathlib import Path

from cpnorm.engine import launch, sweep
from cpnorm.evidence import save

if __name__ == "__main__":
    start = time.perf_counter()
    jobs = sweep.cases()
    records = sweep.run(jobs, progress=True)
    seconds = round(time.perf_counter() - start, 1)
    measured = {"cases": len(jobs), "seconds": seconds, "launch": launch.measure()}
    path = Path(sys.argv[1]) / f"engine-mcore-{version('megatron-core')}.json"
    save(path, "engine", records, **measured)
    failed = [record for record in records if record.message]
    print(f"{len(jobs)} cases, {len(failed)} of them refused or failed, in {seconds:.0f} s")
