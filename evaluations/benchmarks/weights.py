"""Plot seconds and memory against the number of weights: three measured models, and 7 billion weights, computed.

    python evaluations/benchmarks/weights.py [--plot FILE.png]

Reads the reports of `seconds.py` (one for each model) and of `size.py --shape 7b`. For 7 billion weights, seconds are
those of the largest measured model times the ratio of the operations in docs/scale.md, and memory is by the formulas
there. Beside it stands the trial of `size.py` with random weights, in one process. Its work differs somewhat: it
collects statistics of 2,048 tokens that the model samples, and makes five steps of v*.
"""

import json
from pathlib import Path
from typing import Any

import click

from ffedit.display.figures.saving import save_figure

REPORTS = Path(__file__).parents[1] / "reports"
MEASURED = ("smollm2", "gemma3-270m", "qwen2.5-1.5b")
# Mistral 7B's shape with the vocabulary of `size.py`; the layer is a quarter of the depth, as the default is.
LARGE = {
    "model": "7B, computed", "weights": 7_391_293_440, "bytes": 2 * 7_391_293_440, "layers": 32, "layer": 8,
    "d_model": 4096, "d_ff": 14336, "layer_weights": 218_112_000,
}  # fmt: skip
NAME_TOKENS = 10_000  # 1,308 names, every third, of about 4 tokens, each after a mention of as many
IMPORTS = 0.4e9  # bytes: Python, torch, transformers
LINES = {
    "first apply": "first apply",
    "later apply": "later apply",
    "edit of 1": "one edit",
    "edit of 50": "fifty at once, each",
}


def statistics_operations(shape: dict[str, Any]) -> float:
    """Return the operations of key statistics: the pass, the names, the sums, and the factorisations."""
    f, below = shape["d_ff"], 2 * (shape["layer"] + 1) * shape["layer_weights"]
    return below * (f / 2 + NAME_TOKENS) + f**3 / 2 + 7 * f**3 / 3


def value_operations(shape: dict[str, Any]) -> float:
    """Return the operations of an edit up to a factor: each step runs the layers above the edited one both ways."""
    return 4 * (shape["layers"] - shape["layer"]) * shape["layer_weights"]


def memory(shape: dict[str, Any]) -> float:
    """Return the most bytes that `apply` holds: the weights, and 8 (2f² + 3df) where the equations are solved."""
    d, f = shape["d_model"], shape["d_ff"]
    return IMPORTS + shape["bytes"] + 8 * (2 * f * f + 3 * d * f)


def computed(largest: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of `LARGE`, from those of the largest model that was measured."""
    reads = LARGE["bytes"] / largest["bytes"]  # a later `apply` mostly reads all weights, again and again
    later = largest["later apply"]["seconds"] * reads
    collected = largest["first apply"]["seconds"] - largest["later apply"]["seconds"]
    collected *= statistics_operations(LARGE) / statistics_operations(largest)
    edits = value_operations(LARGE) / value_operations(largest)
    most = memory(LARGE)
    return LARGE | {
        "first apply": {"seconds": later + collected, "peak": most},
        "later apply": {"seconds": later, "peak": most},
        **{name: {"seconds": largest[name]["seconds"] * edits} for name in ("edit of 1", "edit of 50")},
    }


def tried(report: dict[str, Any]) -> dict[str, float]:
    """Return the figures of `size.py`: seconds of the steps of a first `apply`, and the peak memory."""
    steps = {row["step"]: row for row in report["steps"]}
    return {
        "first apply": sum(steps[name]["seconds"] for name in ("load", "statistics", "edit", "evaluate")),
        "peak": max(row["peak"] for name, row in steps.items() if name != "export"),
    }


def draw(rows: list[dict[str, Any]], trial: dict[str, float]) -> Any:
    """Draw seconds and memory against weights; computed points are hollow, the trial is a cross."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = [row["weights"] for row in rows]
    sides = [(left, {name: [row[name]["seconds"] for row in rows] for name in LINES}, LINES)]
    peaks = {name: [row[name]["peak"] / 1e9 for row in rows] for name in ("first apply", "later apply")}
    weights = {"weights": [row["bytes"] / 1e9 for row in rows]}
    sides.append((right, peaks | weights, {name: name for name in (*peaks, *weights)}))
    for panel, lines, labels in sides:
        for (name, values), color in zip(lines.items(), ("#d55e00", "#0072b2", "#009e73", "#cc79a7"), strict=False):
            panel.plot(counts[:-1], values[:-1], "o-", color=color, label=labels[name])
            panel.plot(counts[-2:], values[-2:], "--", color=color)
            panel.plot(counts[-1:], values[-1:], "o", color=color, fillstyle="none")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(counts, [f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.0f}M" for n in counts])
        panel.minorticks_off()
        panel.set_xlabel("weights (○ computed, × tried with random ones)")
        panel.grid(alpha=0.3, which="major")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize="small")
    left.plot(counts[-1:], [trial["first apply"]], "x", color="#d55e00")
    right.plot(counts[-1:], [trial["peak"] / 1e9], "x", color="#d55e00")
    left.set_ylabel("seconds, two cores")
    right.set_ylabel("peak memory, GB")
    return figure


@click.command(help=__doc__)
@click.option("--plot", type=click.Path(path_type=Path), help="The curves.")
def main(plot: Path | None) -> None:
    """Print a table, and draw the curves."""
    measured = [json.loads((REPORTS / f"benchmarks/seconds-{name}.json").read_text("utf-8")) for name in MEASURED]
    rows = [*measured, computed(measured[-1])]
    trial = tried(json.loads((REPORTS / "size-7b.json").read_text("utf-8")))
    print(f"| model | {' | '.join(LINES.values())} | peak memory |\n|---{5 * '|---:'}|")
    for row in rows:
        seconds = [f"{row[name]['seconds']:,.1f}" for name in LINES]
        peak = max(row[name]["peak"] for name in ("first apply", "later apply")) / 1e9
        print(f"| {row['model'].removesuffix('.gguf')} | {' | '.join(seconds)} | {peak:.1f} GB |")
    print(f"| 7B, tried | {trial['first apply']:,.0f} | | | | {trial['peak'] / 1e9:.1f} GB |")
    if plot is not None:
        save_figure(plot, lambda: draw(rows, trial))


if __name__ == "__main__":
    main()
