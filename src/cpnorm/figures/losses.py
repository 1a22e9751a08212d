"""Pictures of the loss check: who owns a row, what each rank contributes, and the errors."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cpnorm.case import Case, Sequence
from cpnorm.check import Record, sharded, unsharded
from cpnorm.figures import FLOOR, decade
from cpnorm.sweep import tabulate


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
        decades[row, column] = decade(error)
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
