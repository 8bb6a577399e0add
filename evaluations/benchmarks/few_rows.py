"""Products of few rows: oneDNN beside torch's own call of MKL, in milliseconds and operations per second.

    python evaluations/benchmarks/few_rows.py [--d-in 1536] [--d-out 8960] [--out FILE.json]

Each is the fastest of a few runs over weights that do not fit into the processor's cache together. The last column is
how many times as fast oneDNN is: above 1 up to `ffedit.model.few_rows.FEW` rows, or the choice there is wrong for this
processor. Run it on an idle machine.
"""

import json
from pathlib import Path

import click
import torch
from torch.nn.functional import linear

from ffedit.inference.timing import least_seconds
from ffedit.model.few_rows import FEW, product

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, FEW, 2 * FEW)
WEIGHTS = 6


@click.command(help=__doc__)
@click.option("--d-in", default=1536, show_default=True)
@click.option("--d-out", default=8960, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file to write the figures to.")
def main(d_in: int, d_out: int, out: Path | None) -> None:
    """Time both products for each number of rows."""
    weights = [torch.randn(d_out, d_in) for _ in range(WEIGHTS)]
    found = []
    for rows in ROWS:
        states, work = torch.randn(rows, d_in), 2 * rows * d_in * d_out * WEIGHTS
        mkl, onednn = (
            least_seconds(lambda call=call, states=states: [call(states, weight) for weight in weights])
            for call in (linear, product)
        )
        found.append({"rows": rows, "mkl": mkl / WEIGHTS, "onednn": onednn / WEIGHTS, "ratio": mkl / onednn})
        speeds = f"{work / mkl / 1e9:4.0f} and {work / onednn / 1e9:4.0f} GFLOP/s"
        print(f"{rows:4} rows: {1e3 * mkl / WEIGHTS:7.2f} and {1e3 * onednn / WEIGHTS:7.2f} ms, {speeds}", end="")
        print(f", {mkl / onednn:.2f} times as fast")
    if out is not None:
        out.write_text(json.dumps({"d_in": d_in, "d_out": d_out, "products": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
