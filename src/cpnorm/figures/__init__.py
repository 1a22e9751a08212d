"""Pictures of the book, matplotlib only, readable at a width of 700 pixels."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cpnorm.case import Case, Sequence
from cpnorm.check import Record, sharded, unsharded
from cpnorm.evidence import Record as EngineRecord
from cpnorm.sweep import tabulate

FLOOR = -17.0  # decade that stands for an error of exactly 0


def heat_map(records: list[Record]) -> Figure:
    """Largest relative error of each loss (row) and aggregation mode (column).

    Colour is log10 of the error, the number in a cell the error itself; 0 stands at the lower end
    of the scale. Cells without a record stay white.
    """
    cells = tabulate(records)
    losses = list(dict.fromkeys(loss for loss, _ in cells))
    modes = list(dict.fromkeys(mode for _, mode in cells))
    decades = np.full((len(losses), len(modes)), np.nan)
    figure, axes = plt.subplots(figsize=(7, 1.6 + 0.36 * len(losses)), layout="constrained")
    for (loss, mode), found in cells.items():
        row, column = losses.index(loss), modes.index(mode)
        error = max(record.error for record in found)
        decades[row, column] = max(np.log10(error), FLOOR) if error > 0 else FLOOR
        dark = decades[row, column] < -14
        text = f"{error:.0e}" if error > 0 else "0"
        axes.text(
            column, row, text, ha="center", va="center", size=9, color="white" if dark else "black"
        )
    image = axes.imshow(decades, cmap="viridis", vmin=FLOOR, vmax=-12, aspect="auto")
    axes.set_xticks(range(len(modes)), [_wrapped(mode) for mode in modes], size=9)
    axes.set_yticks(range(len(losses)), losses, size=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label="log10 of the largest relative error", shrink=0.9)
    return figure


def ownership(own: torch.Tensor, prompts: tuple[int, ...], responses: tuple[int, ...]) -> Figure:
    """Which rank owns which row of a micro-batch; `own` is bool `(C, R)`, as `layout.owners`.

    A row with a dot holds the log-probability of a response token.
    """
    C, R = own.shape
    figure, axes = plt.subplots(figsize=(7, 1.1 + 0.3 * C), layout="constrained")
    colours = np.where(own, np.arange(1, C + 1)[:, None], 0)
    palette = ["white", *(plt.get_cmap("tab20")(c % 20) for c in range(C))]
    axes.imshow(colours, cmap=ListedColormap(palette), vmin=0, vmax=C, aspect="auto")
    start = 0
    for prompt, response in zip(prompts, responses, strict=True):
        tokens = np.arange(start + prompt - 1, start + prompt - 1 + response)
        owner = own[:, tokens].int().argmax(0)
        axes.plot(tokens, owner, ".", color="black")
        start += prompt + response
        if start < R:
            axes.axvline(start - 0.5, color="black", linewidth=2)
    axes.set_yticks(range(C), [f"rank {c}" for c in range(C)], size=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xticks(np.arange(R + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(C + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="0.85", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    axes.set_xlabel("row of the micro-batch")
    return figure


def shares(case: Case) -> Figure:
    """The gradient of every rank, row by row, against the unsharded one, from a run of `case`.

    A background stripe is the colour of the rank that owns the row, a bar that of the rank whose
    gradient is not zero there.
    """
    reference = unsharded(case)
    _, gradient, own = sharded(case, reference.copies)
    figure, axes = plt.subplots(figsize=(8, 2.9), layout="constrained")
    palette, rows = plt.get_cmap("tab10"), np.arange(case.T)
    for c in range(case.C):
        for row in rows[own[c]]:
            axes.axvspan(row - 0.5, row + 0.5, color=palette(c), alpha=0.13, linewidth=0)
        axes.bar(rows, gradient[c], color=palette(c), label=f"rank {c}")
    axes.plot(rows, reference.gradient, "_", color="black", markersize=9, label="without sharding")
    axes.axhline(0, color="black", linewidth=0.8)
    start = 0
    for number, s in enumerate(case.sequences):
        axes.axvline(start - 0.5, color="black", linewidth=0.8)
        title = f"sequence {number}: {s.prompt} + {s.response} tokens"
        axes.text(start, 1.02, title, transform=axes.get_xaxis_transform(), size=9)
        start += s.length
    axes.set(xlim=(-0.5, case.T - 0.5), xlabel="row", ylabel=r"$\partial J / \partial x$")
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22), "frameon": False}
    axes.legend(ncols=case.C + 1, fontsize=8, **below)
    return figure


SERIES = {
    (True, "oracle"): "in float64, against the oracle",
    (False, "oracle"): "as Megatron computes, against the oracle",
    (False, "engine"): "as Megatron computes, against itself unsharded",
}
"""`exact` and `reference` of a record: what that comparison is called."""


def coverage(records: list[EngineRecord]) -> Figure:
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
                decades[cell] = np.fmax(decades[cell], _decade(record.residual))
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


def float32(records: list[EngineRecord]) -> Figure:
    """Errors of every run, by TP and PP: of the ratio to the reference, and the residual.

    A point is a record, a circle the dense model and a triangle the mixture of experts. The lines
    are a float32's unit roundoff and its spacing.
    """
    records = [r for r in records if not r.message and (r.exact, r.reference) in SERIES]
    groups = sorted({_row(r)[1:] for r in records})
    figure, panels = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    titles = {"ratio_error": "error of T/K", "residual": "residual"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for number, (key, label) in enumerate(SERIES.items()):
            for experts, marker in ((False, "o"), (True, "^")):
                mine = [r for r in records if (r.exact, r.reference) == key]
                mine = [r for r in mine if bool(r.model.experts) == experts]
                spread = np.linspace(-0.11, 0.11, len(mine))
                x = [groups.index(_row(r)[1:]) for r in mine]
                y = [10 ** _decade(getattr(r, name)) for r in mine]
                x = x + spread + 0.27 * (number - 1)
                style = {"color": f"C{number}", "alpha": 0.6, "markersize": 4}
                axes.plot(x, y, marker, label=None if experts else label, **style)
        for power, style in ((-24, ":"), (-23, "--")):
            line = {"color": "black", "linewidth": 0.8, "linestyle": style}
            axes.axhline(2.0**power, label=f"$2^{{{power}}}$", **line)
        axes.set_yscale("log")
        axes.set_ylabel(title)
        axes.set_ylim(bottom=10 ** (FLOOR - 0.5))
    panels[1].set_xticks(range(len(groups)), [_row_name((None, *g)) for g in groups], size=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _row(record):
    """Experts, TP, PP and virtual PP, 0 for none."""
    case = record.case
    return record.model.experts or 0, case.tp, case.pp, case.vpp or 0


def _row_name(row):
    experts, tp, pp, vpp = row
    model = {None: "", 0: "dense, "}.get(experts, "MoE, ")
    return f"{model}TP {tp}, PP {pp}" + f"×{vpp}" * bool(vpp)


def _decade(error):
    """log10 of an error, `FLOOR` for less and for 0."""
    return max(np.log10(error), FLOOR) if error > 0 else FLOOR


def draw(folder: Path) -> None:
    """The pictures that pages show and no notebook draws, as PNG files in `folder`."""
    case = Case(sequences=(Sequence(6, 18), Sequence(20, 9)), cp=4, micro_batch_size=2, seed=3)
    folder.mkdir(parents=True, exist_ok=True)
    shares(case).savefig(folder / "shares.png", dpi=150, metadata={"Software": None})


def _wrapped(mode):
    """A mode's name on two or three lines."""
    return (
        mode.replace(", ", "\n").replace("-token-", "-\ntoken-").replace("sum-norm", "sum-\nnorm")
    )
