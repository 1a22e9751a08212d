"""What zigzag shares make of local means."""

from collections.abc import Sequence as Many

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from cpnorm.case import Sequence
from cpnorm.local_means import factors, shares


def weights_of_tokens(prompt: int, responses: Many[int], C: int) -> np.ndarray:
    """`n_s / (C n_{s,c})`, rank (row) by response length (column), nan where a share is empty."""
    rows = [factors(shares(Sequence(prompt, response), C)) for response in responses]
    return np.array([[np.nan if f is None else float(f) for f in row] for row in rows]).T


def balance(prompt: int, responses: Many[int], ranks: Many[int]) -> Figure:
    """What a token weighs if its rank divides by its own share and the ranks are averaged.

    Above: every rank, for the last of `ranks`; grey where a rank has no token of the response.
    Below: the largest and the smallest weight, for each of `ranks`.
    """
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 5.6), sharex=True, layout="constrained", height_ratios=(3, 2)
    )
    table = np.log2(weights_of_tokens(prompt, responses, ranks[-1]))
    above.set_facecolor("0.8")
    style = {"cmap": "RdBu_r", "vmin": -3, "vmax": 3, "shading": "nearest"}
    image = above.pcolormesh(responses, range(ranks[-1]), table, **style)
    above.set_ylabel(f"rank of C = {ranks[-1]}")
    above.set_yticks(range(ranks[-1]))
    above.invert_yaxis()
    bar = figure.colorbar(image, ax=above, label="weight of a token, 1 is right")
    bar.set_ticks(range(-3, 4), labels=["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    for number, C in enumerate(ranks):
        table = weights_of_tokens(prompt, responses, C)
        for extreme, line in ((np.nanmax, "-"), (np.nanmin, "--")):
            label = f"C = {C}" if line == "-" else None
            below.plot(responses, extreme(table, 0), line, color=f"C{number}", label=label)
    below.axhline(1, color="black", linewidth=0.8)
    below.set_xscale("log", base=2)
    below.set_yscale("log", base=2)
    for axis in (below.xaxis, below.yaxis):
        axis.set_major_formatter("{x:g}")
    below.set_ylabel("largest (line) and\nsmallest (dashes)")
    below.set_xlabel(f"tokens of the response, after a prompt of {prompt}")
    below.legend(fontsize=8)
    return figure


def angles(lengths: Many[int], measured: dict[str, dict[int, list[float]]]) -> Figure:
    """Angle in degrees by mean response length: a panel for each loss, a line for each C."""
    figure, panels = plt.subplots(
        1, len(measured), figsize=(7, 3), sharey=True, layout="constrained"
    )
    for axes, (title, lines) in zip(panels, measured.items(), strict=True):
        for C, line in lines.items():
            axes.semilogx(lengths, line, "o-", base=2, markersize=4, label=f"C = {C}")
        axes.set_title(title, size=9)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xticks(lengths, minor=False)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel("mean response length", size=9)
    panels[0].set_ylabel("degrees to the right gradient")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(fontsize=8)
    return figure
