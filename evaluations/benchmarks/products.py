"""Time products with a weight by oneDNN and by torch's own call of MKL, in milliseconds and operations per second.

    python evaluations/benchmarks/products.py [--d-in 1536] [--d-out 8960] [--out FILE.json]

Each time is that of the fastest of a few runs over weights that do not fit into the processor's cache together, for the
product and for the gradient of its states. The ratio says how many times as fast oneDNN is. If it is not above 1 up to
`ROWS` rows of a product and `ROWS_BACK` of a gradient (`ffedit.model.products`), the choice there is wrong for this
processor. Run it on an idle machine.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import click
import measuring
import torch
from torch import Tensor
from torch.nn.functional import linear

from ffedit.inference.precision import least_seconds
from ffedit.model.products import product

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WEIGHTS = 6
Product = Callable[[Tensor, Tensor], Tensor]


@click.command(help=__doc__)
@click.option("--d-in", default=1536, show_default=True)
@click.option("--d-out", default=8960, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file to write the figures to.")
def main(d_in: int, d_out: int, out: Path | None) -> None:
    """Time both products for each number of rows."""
    weights = [torch.randn(d_out, d_in) for _ in range(WEIGHTS)]
    ways: dict[str, tuple[int, Product, Product]] = {
        "product": (d_in, linear, product),
        "gradient": (d_out, lambda rows, weight: rows @ weight, lambda rows, weight: product(rows, weight.T)),
    }
    times = []
    for count, (name, (width, mkl, onednn)) in itertools.product(ROWS, ways.items()):
        rows = torch.randn(count, width)
        slow, fast = (
            least_seconds(lambda call=call, rows=rows: [call(rows, weight) for weight in weights]) / WEIGHTS
            for call in (mkl, onednn)
        )
        times.append({"rows": count, "of": name, "mkl": slow, "onednn": fast, "ratio": slow / fast})
        speeds = " and ".join(f"{2 * count * d_in * d_out / seconds / 1e9:.0f}" for seconds in (slow, fast))
        milliseconds = f"{1e3 * slow:.2f} and {1e3 * fast:.2f} ms"
        print(f"{count:4} rows, {name}: {milliseconds}, {speeds} GFLOP/s, {slow / fast:.2f} times as fast", flush=True)
    measuring.finish(out, {"d_in": d_in, "d_out": d_out, "products": times}, True)


if __name__ == "__main__":
    main()
