"""How far the gradient's scale is off, against the tokens of a micro-batch."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from cpnorm.count import expected, worst

SIZES = (2, 8, 32, 128)
DYNAMIC = {8192: "o", 16384: "s", 32768: "^"}
"""Tokens a GPU of a dynamic batch: marker. verl multiplies them by C."""
SHORT = (100, 500)  # tokens of one short sequence
LARGEST = 2**23  # tokens, right end of the picture


def bias() -> Figure:
    """T/K - 1 on multiples of C: a band for each C of `SIZES`, its top the worst case, its lower
    edge the average."""
    figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
    axes.set(xscale="log", yscale="log", xlim=(1.5, 2 * LARGEST), ylim=(2e-8, 3))
    for number, C in enumerate(SIZES):
        tokens = [C * 2**k for k in range((LARGEST // C).bit_length())]
        high, low = ([float(f(t, C)) for t in tokens] for f in (worst, expected))
        style = {"color": f"C{number}"}
        axes.fill_between(tokens, low, high, alpha=0.35, linewidth=0, label=f"CP {C}", **style)
        axes.plot(tokens, high, linewidth=1.2, **style)
        for limit, marker in DYNAMIC.items():
            axes.plot(limit * C, worst(limit * C, C), marker, markersize=5, **style)
    for limit, marker in DYNAMIC.items():
        label = f"dynamic batch, {limit // 1024}k tokens a GPU"
        axes.plot([], [], marker, color="black", label=label)
    axes.axvspan(*SHORT, color="0.9", zorder=0, linewidth=0)
    axes.text(225, 6e-8, "micro-batch size 1,\n100 to 500 tokens", size=8, ha="center")
    axes.set(xlabel="tokens of a micro-batch, a multiple of CP", ylabel=r"$T/K - 1$")
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, loc="upper right")
    return figure
