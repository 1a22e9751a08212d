"""A run's record: what ran, where, with which versions, and what came out. JSON in `evidence/`.

One line a record, sorted, so that two runs can be compared line by line.
"""

import json
import os
import platform
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from .case import Case, Sequence
from .transformer import Model

PACKAGES = ("torch", "verl", "megatron-core", "cpnorm")
REFERENCES = ("oracle", "engine")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run of `case` on `model`, compared with one reference.

    `reference` is "oracle", plain torch without any parallelism, or "engine", the same engine with
    cp = tp = pp = 1 (and dp = 1 where the loss is additive over micro-batches). `T` and `K` are the
    routed tokens and Megatron's count, None in the averaging regime; `predicted` is T/K before the
    run, `ratio` the measured one. `residual` is the largest deviation from `ratio` times the
    reference, of the largest entry of the gradient, at the parameter `worst`; `loss_error` is as
    `engine.Agreement.loss`. `seconds` is what the run took. Where the case was refused or failed,
    `message` says why, and what was not measured is None.
    """

    case: Case
    model: Model
    exact: bool
    reference: str = "oracle"
    T: int | None = None
    K: int | None = None
    predicted: float | None = None
    ratio: float | None = None
    residual: float | None = None
    worst: str | None = None
    loss_error: float | None = None
    seconds: float | None = None
    message: str | None = None

    def __post_init__(self):
        if self.reference not in REFERENCES:
            allowed = ", ".join(REFERENCES)
            raise ValueError(f"reference is {self.reference!r}, allowed is one of {allowed}")
        numbers = (self.predicted, self.ratio, self.residual, self.loss_error, self.seconds)
        if self.message is None and not all(isinstance(x, float) for x in numbers):
            raise ValueError("a record has neither its numbers nor a message")

    @property
    def ratio_error(self) -> float:
        """Relative error of the measured T/K."""
        return abs(self.ratio / self.predicted - 1)


@dataclass(frozen=True)
class Evidence:
    """A file of records: its `kind`, where it comes from, and what else was `measured`."""

    kind: str
    provenance: dict
    measured: dict
    records: tuple[Record, ...]

    @property
    def cases(self) -> int:
        """Cases that ran: (case, model, exact) of which some record is not a refusal."""
        return len({(r.case, r.model, r.exact) for r in self.records if r.message is None})


def provenance() -> dict:
    """Versions, platform and the date (UTC); nothing that names the machine or its user."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }


def save(path: Path, kind: str, records: list[Record], **measured) -> None:
    """Write `records` and `measured` (numbers by name) with `provenance()`, whole or not at all.

    What the cases of all records share is written once, as `common`; so it is for the models.
    """
    rows = [{f.name: getattr(record, f.name) for f in fields(Record)} for record in records]
    common = {}
    for key in ("case", "model"):
        plain = [_without_none(asdict(row[key])) for row in rows]
        first = plain[0] if plain else {}
        shared = {k: v for k, v in first.items() if all(p.get(k) == v for p in plain)}
        common[key] = shared
        for row, values in zip(rows, plain, strict=True):
            row[key] = {k: v for k, v in values.items() if k not in shared}
    lines = sorted(json.dumps(row, allow_nan=False) for row in rows)
    head = {"kind": kind, "provenance": provenance(), "measured": measured, "common": common}
    parts = [
        f"{json.dumps(k)}: {json.dumps(v, indent=1, allow_nan=False)}" for k, v in head.items()
    ]
    text = ",\n".join([*parts, '"records": [\n' + ",\n".join(lines) + "\n]"])
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".part")
    half.write_text("{\n" + text + "\n}\n")
    half.replace(path)


def load(path: Path) -> Evidence:
    """What `save` wrote. `ValueError` that says in one sentence what is wrong with the file."""
    try:
        file = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: `make evidence` writes it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a file of evidence: {error}") from error
    try:
        common = file["common"]
        records = tuple(_record(row, common) for row in file["records"])
        return Evidence(file["kind"], file["provenance"], file["measured"], records)
    except KeyError as error:
        raise ValueError(f"{path} is not a file of evidence: it has no {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of evidence: {error}") from error


def _record(row, common):
    case = common["case"] | row["case"]
    sequences = tuple(Sequence(**s) for s in case["sequences"])
    model = Model(**common["model"] | row["model"])
    return Record(**row | {"case": Case(**case | {"sequences": sequences}), "model": model})


def _without_none(value):
    """`value` with lists for tuples, and without the keys whose value is None."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value
