"""Time products with a weight as torch makes them and as ffedit does, in milliseconds and operations per second.

    python evaluations/benchmarks/products.py [--d-in 1536] [--d-out 8960] [--out FILE.json]

Each time is that of the fastest of a few runs over weights that do not fit into the processor's cache together: for the
product in float32 and the gradient of its states, by torch's call of MKL and by oneDNN; and for the product of few rows
in bfloat16, by torch's call of oneDNN and by a conversion to float32, which ffedit prefers on a processor without
instructions for bfloat16. The ratio says how many times as fast the second is. If it is not above 1 up to `ROWS` rows
of a product and `ROWS_BACK` of a gradient, and for bfloat16 unless `BFLOAT16` (`ffedit.model.products`), the choice
there is wrong for this processor. Run it on an idle machine.
"""

from collections.abc import Callable
from pathlib import Path

import click
import measuring
import torch
from torch import Tensor
from torch.nn.functional import linear

from ffedit.inference.precision import least_seconds
from ffedit.model.products import converted, product

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FEW = ROWS[:7]  # emulated products of more rows take minutes
WEIGHTS = 6
Product = Callable[[Tensor, Tensor], Tensor]


def gradient(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of states, from that of their product."""
    return rows @ weight


@click.command(help=__doc__)
@click.option("--d-in", default=1536, show_default=True)
@click.option("--d-out", default=8960, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file to write the figures to.")
def main(d_in: int, d_out: int, out: Path | None) -> None:
    """Time both ways for each number of rows."""
    weights = [torch.randn(d_out, d_in) for _ in range(WEIGHTS)]
    ways: dict[str, tuple[int, torch.dtype, Product, Product]] = {
        "product": (d_in, torch.float32, linear, product),
        "gradient": (d_out, torch.float32, gradient, lambda rows, weight: product(rows, weight.T)),
        "bfloat16": (d_in, torch.bfloat16, linear, converted),
    }
    times = []
    for name, (width, dtype, torchs, ours) in ways.items():
        cast = [weight.to(dtype) for weight in weights]
        for count in ROWS if dtype == torch.float32 else FEW:
            rows = torch.randn(count, width, dtype=dtype)
            slow, fast = (
                least_seconds(lambda call=call, rows=rows, cast=cast: [call(rows, weight) for weight in cast]) / WEIGHTS
                for call in (torchs, ours)
            )
            times.append({"rows": count, "of": name, "torch": slow, "ours": fast, "ratio": slow / fast})
            speeds = " and ".join(f"{2 * count * d_in * d_out / seconds / 1e9:.0f}" for seconds in (slow, fast))
            milliseconds = f"{1e3 * slow:.2f} and {1e3 * fast:.2f} ms"
            ratio = f"{slow / fast:.2f} times as fast"
            print(f"{count:4} rows, {name}: {milliseconds}, {speeds} GFLOP/s, {ratio}", flush=True)
    measuring.finish(out, {"d_in": d_in, "d_out": d_out, "products": times}, True)


if __name__ == "__main__":
    main()
