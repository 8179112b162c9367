"""Draws what `kernels.py` measured: shares of the copy rate over prompt lengths.

python benchmarks/gpu/kernels_plot.py benchmarks/results/DATE-CARD-kernels.json docs/_static/kernels.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure

__all__ = ["draw"]

LINES: Final = {
    "gather": ("#1f5fa8", "-"),
    "gather+digest": ("#1f5fa8", "--"),
    "convert": ("#b8541a", "-"),
    "convert+digest": ("#b8541a", "--"),
}


def draw(results: Path, picture: Path) -> None:
    """One line for each kernel."""
    found = json.loads(results.read_text())
    mpl.rcParams["svg.hashsalt"] = "pdhandoff"  # the same picture from the same figures
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    tokens = [run["tokens"] for run in found["runs"]]
    for name, (colour, style) in LINES.items():
        shares = [100 * run[name]["share_of_copy"] for run in found["runs"]]
        axes.plot(tokens, shares, style, color=colour, marker="o", label=name.replace("+", " with "))
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.set_ylim(0, 105)
    axes.axhline(100, color="#777777", linewidth=0.8)
    axes.set_xlabel("prompt tokens, GLM-5, 79 layers")
    axes.set_ylabel("percent of the copy rate")
    axes.set_title(f"{found['machine']['card']}: bytes read and written, against a device-to-device copy", fontsize=10)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
