"""One token's gradient on its way from verl's loss to the optimizer."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from cpnorm.regimes import STAGES

PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}


def way(values: dict[str, Tensor], labels: dict[str, list[str]], reference: float) -> Figure:
    """A panel for each way, by its name: `|values|`, `(5,)`, after each of `STAGES`, log scale.

    `labels` has five texts a way: one for each step between two stages, and one for the title. The
    dashed line is `|reference|`, the gradient without any sharding.
    """
    figure, panels = plt.subplots(
        1, len(values), figsize=(7.4, 4.8), sharey=True, layout="constrained"
    )
    for axes, (name, at) in zip(panels, values.items(), strict=True):
        heights = at.abs().tolist()
        axes.semilogy(heights, "o-", color="C0")
        line = axes.axhline(abs(reference), color="black", linestyle="--", linewidth=0.9)
        *steps, end = labels[name]
        for k, text in enumerate(steps):
            middle = (heights[k] * heights[k + 1]) ** 0.5
            axes.text(k + 0.5, middle, text, ha="center", va="center", size=9, bbox=PAPER)
        axes.set_xticks(range(len(STAGES)), STAGES, rotation=90, size=8)
        axes.set_xlim(-0.4, len(STAGES) - 0.6)
        axes.set_title(f"{name}\n{end}", size=10)
        axes.grid(axis="y", color="0.9")
    lowest, highest = panels[0].get_ylim()
    panels[0].set_ylim(lowest / 1.3, highest * 1.2)
    panels[0].set_ylabel("gradient of one token, absolute")
    figure.legend([line], ["without sharding"], loc="outside lower left", fontsize=8, frameon=False)
    return figure
