"""What a user waits for: the first `ffedit apply` on a model, a later one, an edit alone, and fifty facts at once.

    python evaluations/benchmarks/seconds.py [--model smollm2] [--data evaluations/data/smollm2-counterfact.json]

The first command begins with an empty cache: it converts the model where that is needed, and collects its
statistics. Run it on an idle machine: the figures are of the clock.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

import ffedit
from ffedit.layer_choice.published import auto_layer

HERE = Path(__file__).parents[1]
FACT = HERE.parent / "edits" / "eiffel-tower.json"


def timed(command: list[str]) -> float:
    """Seconds that a command takes, the start of Python included."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


@click.command(help=__doc__)
@click.option("--model", default="smollm2", show_default=True)
@click.option(
    "--data", default=HERE / "data" / "smollm2-counterfact.json", type=click.Path(exists=True, path_type=Path)
)
@click.option("--count", default=50, show_default=True, help="Facts at once, of different subjects.")
def main(model: str, data: Path, count: int) -> None:
    """Time the commands, then the edits inside one process."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FFEDIT_CACHE"] = cache
        command = [sys.executable, "-m", "ffedit", "apply", str(FACT), "--model", model]
        for name in ("first apply", "later apply"):
            print(f"{name}: {timed(command):.1f} s", flush=True)
        editable = ffedit.load(model)
        layer = auto_layer(editable).layer
        stats = ffedit.stats(editable, layers=[layer])
        facts = list({fact.subject: fact for fact in ffedit.read_facts(data)}.values())[: count + 1]
        ffedit.edit(editable, facts[-1:], layers=[layer], stats=stats)  # fills what is filled once
        for some in (facts[:1], facts[:count]):
            started = time.perf_counter()
            ffedit.edit(editable, some, layers=[layer], stats=stats)
            print(f"edit of {len(some)}: {(time.perf_counter() - started) / len(some):.2f} s a fact", flush=True)


if __name__ == "__main__":
    main()
