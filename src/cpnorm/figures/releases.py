"""What each release of verl makes of each configuration, as coloured cells."""

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

KINDS = {
    "asked": ("#7fbf7b", "the objective asked for"),
    "sequence mean": ("#fee08b", "seq-mean-token-mean in its place"),
    "neither": ("#bdbdbd", "neither"),
    "refused": ("#d6604d", "refused"),
}
"""Outcome: colour and meaning."""


def outcomes(result: dict[tuple, tuple[str, float | None]]) -> Figure:
    """A block for each place, in it a row for each configuration and a column for each release.

    `result` maps (release, place, loss, mode, binding) to an outcome and the gradient's factor,
    None where there is none, which is written into the cell unless it is 1.
    """
    releases, places = (list(dict.fromkeys(key[k] for key in result)) for k in (0, 1))
    blocks = {
        place: list(dict.fromkeys(k[2:] for k in result if k[1] == place)) for place in places
    }
    figure, axes = plt.subplots(
        len(places),
        1,
        figsize=(7, 9.5),
        height_ratios=[len(rows) for rows in blocks.values()],
        layout="constrained",
    )
    colours = ListedColormap([colour for colour, _ in KINDS.values()])
    for axis, (place, rows) in zip(axes, blocks.items(), strict=True):
        rows.sort(key=lambda row: (row[2], row[0]))
        cells = [[result[release, place, *row] for release in releases] for row in rows]
        numbers = [[list(KINDS).index(kind) for kind, _ in line] for line in cells]
        axis.imshow(numbers, cmap=colours, vmin=0, vmax=len(KINDS) - 1, aspect="auto")
        for y, line in enumerate(cells):
            for x, (_, ratio) in enumerate(line):
                if ratio is not None and abs(ratio - 1) > 1e-9:
                    axis.text(x, y, f"× {ratio:.4g}", ha="center", va="center", size=8)
        names = [("value loss" if b == "critic" else loss, mode) for loss, mode, b in rows]
        axis.set_yticks(range(len(rows)), [f"{loss}, {mode}" for loss, mode in names], size=8)
        axis.set_xticks(range(len(releases)), [f"verl {r}" for r in releases], size=8)
        axis.set_title(place, size=9, loc="left")
        axis.hlines([y + 0.5 for y in range(len(rows) - 1)], -0.5, 2.5, color="white")
        axis.vlines([0.5, 1.5], -0.5, len(rows) - 0.5, color="white", linewidth=3)
        axis.tick_params(length=0)
    patches = [Patch(color=colour, label=meaning) for colour, meaning in KINDS.values()]
    figure.legend(handles=patches, fontsize=8, ncols=4, loc="outside upper center")
    return figure
