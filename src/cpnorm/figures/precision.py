"""Rounding errors against tokens, vocabulary and sequence length, each with its bound."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def trips(tokens: list[int], errors: Mapping[str, list[float]], bounds: Mapping[str, float]):
    """Largest relative error of x T / D / T against T, a line for each dtype, dashed its bound.

    Both are by name of the dtype; `errors` has one entry for each of `tokens`, inf (not drawn)
    where a number left the dtype's range.
    """
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for number, (name, values) in enumerate(errors.items()):
        style = {"color": f"C{number}"}
        axes.loglog(tokens, values, ".-", linewidth=0.8, label=name, **style)
        axes.axhline(bounds[name], linestyle="--", linewidth=1, **style)
    axes.set(xlabel="T, routed tokens of the mini-batch", ylabel="largest relative error")
    axes.legend(fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=(0, 0.75))
    return figure


def epsilon(counts: list[int], shifts: list[float]) -> Figure:
    """Relative change of a sequence's mean against its n tokens, a float64 mask, with 1e-8 / n."""
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.loglog(counts, shifts, "o", markersize=4, label="float64 mask, agg_loss")
    axes.loglog(counts, [1e-8 / n for n in counts], "--", linewidth=1, label=r"$10^{-8} / n$")
    for power in (-24, -53):
        axes.axhline(2.0**power, color="black", linewidth=0.8, linestyle=":")
        axes.text(counts[-1], 2.0**power, f"$2^{{{power}}}$", va="bottom", ha="right", size=8)
    axes.set(xlabel="n, counted tokens of the sequence", ylabel="relative change")
    axes.legend(fontsize=8, loc="center right")
    return figure


def cross_entropy(found: list[tuple[int, float, float, float, float]]) -> Figure:
    """Error of a log-probability against the size of the vocabulary, a colour for each scale.

    Each of `found` is (V, scale of the logits, largest error, bound for sums in any order, bound
    for a balanced tree).
    """
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, scale in enumerate(sorted({one[1] for one in found})):
        sizes, _, *lines = zip(*(one for one in found if one[1] == scale), strict=True)
        styles = {"o-": "measured", "--": "bound, any order", ":": "bound, balanced tree"}
        for (style, label), values in zip(styles.items(), lines, strict=True):
            name = f"logits of scale {scale:g}, {label}"
            axes.loglog(sizes, values, style, color=f"C{number}", markersize=4, label=name)
    axes.set(xlabel="V, vocabulary entries", ylabel="error of a log-probability")
    figure.legend(fontsize=7, ncols=3, loc="outside lower center", frameon=False)
    return figure


def loss_scale(series: Mapping[str, Mapping[int, float | None]], initial: float) -> Figure:
    """Loss scale of the first step that counts, by T; None, drawn as a cross, where none does.

    The shaded band is what the scale may be: from 1 to `initial`, where it starts.
    """
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.axhspan(1, initial, color="0.94", linewidth=0)
    axes.set_yscale("log", base=2)
    for number, (name, points) in enumerate(series.items()):
        alive = {T: scale for T, scale in points.items() if scale}
        style = {"color": f"C{number}"}
        axes.plot(alive.keys(), alive.values(), "o-", label=name, markersize=5, **style)
        stuck = [T for T, scale in points.items() if not scale]
        if stuck:
            label = f"{name}: every step overflows"
            axes.plot(stuck, [0.5] * len(stuck), "x", label=label, markersize=8, **style)
    axes.set(xscale="log", xlabel="T, routed tokens of the mini-batch", ylabel="loss scale")
    figure.legend(fontsize=8, ncols=1, loc="outside lower center", frameon=False)
    return figure
