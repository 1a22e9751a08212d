"""The picture of the engine's sweep."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from cpnorm.evidence import Record
from cpnorm.figures import FLOOR, decade

SERIES = {
    (True, "oracle"): "in float64, against the oracle",
    (False, "oracle"): "as Megatron computes, against the oracle",
    (False, "engine"): "as Megatron computes, against itself unsharded",
}
"""`exact` and `reference` of a record: what that comparison is called."""


def coverage(records: list[Record]) -> Figure:
    """Largest residual of every topology: DP x CP (column) by model, TP and PP (row).

    A panel for each of `SERIES`; "PP 2×2" has two virtual stages a rank. Colour is log10 of the
    residual, 0 at the lower end of the scale. White: not run, or its own reference. A cross: a run
    that was refused or failed.
    """
    records = [r for r in records if r.case.layout == "zigzag"]
    columns = sorted({(r.case.cp, r.case.dp) for r in records})
    rows = sorted({_row(r) for r in records})
    figure, panels = plt.subplots(
        1, len(SERIES), figsize=(7, 1.7 + 0.22 * len(rows)), sharey=True, layout="constrained"
    )
    for axes, (key, title) in zip(panels, SERIES.items(), strict=True):
        decades = np.full((len(rows), len(columns)), np.nan)
        for record in (r for r in records if (r.exact, r.reference) == key):
            cell = rows.index(_row(record)), columns.index((record.case.cp, record.case.dp))
            if record.message:
                axes.plot(*cell[::-1], "x", color="red")
            else:
                decades[cell] = np.fmax(decades[cell], decade(record.residual))
        image = axes.imshow(decades, cmap="viridis", vmin=FLOOR, vmax=-6, aspect="auto")
        axes.set_xticks(range(len(columns)), [f"{dp}×{cp}" for cp, dp in columns], size=8)
        axes.tick_params(axis="x", rotation=90)
        axes.set_yticks(range(len(rows)), [_row_name(row) for row in rows], size=8)
        axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="0.85", linewidth=0.8)
        axes.tick_params(which="both", length=0)
        axes.set_title(title.replace(", ", ",\n"), size=9)
        axes.set_xlabel("DP×CP", size=9)
    figure.colorbar(image, ax=panels, label="log10 of the largest residual", shrink=0.9)
    return figure


def _row(record):
    """Experts, TP, PP and virtual PP, 0 for none."""
    case = record.case
    return record.model.experts or 0, case.tp, case.pp, case.vpp or 0


def _row_name(row):
    experts, tp, pp, vpp = row
    model = {None: "", 0: "dense, "}.get(experts, "MoE, ")
    return f"{model}TP {tp}, PP {pp}" + f"×{vpp}" * bool(vpp)
