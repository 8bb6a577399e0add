"""Undo is exact: bytes of every parameter after 1 to 50 edits, in every family and precision, in random order.

    python evaluations/reliability/undo.py --cases 30 --out evaluations/reports/reliability/undo.json

A case is a run of a state machine (`tests/helpers/undoing.py`) on one family's tiny model in one precision: edits are
made, applied, combined, saved, loaded, exported, undone in memory and in checkpoints, and checkpoints reopened.
After each step all bytes are compared with what they must be, and in the end everything is undone. At last one fresh
process, without ffedit, opens an undone checkpoint of each family and precision.

The gate runs the same machine by hypothesis, which shrinks what fails; here each step is drawn evenly from all rules
that the state allows.
"""

import os
import random
import subprocess
import sys
import traceback
from pathlib import Path

import click
import torch
from tally import Tally

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))

from undoing import DTYPES, FAMILIES, UndoMachine, base_of, undone_checkpoint, walk

# A process that knows nothing of ffedit: whether two folders open with the same bytes.
FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
def raw(folder):
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    flat = {name: (t.dtype, t.contiguous().reshape(-1)) for name, t in state.items()}
    return {name: (dtype, t.view(torch.uint8).numpy().tobytes()) for name, (dtype, t) in flat.items()}
pairs = sys.argv[1:]
for base, undone in zip(pairs[::2], pairs[1::2]):
    print("same" if raw(base) == raw(undone) else "different", flush=True)
"""


@click.command(help=__doc__)
@click.option("--cases", default=30, show_default=True, help="Runs for each family, in one precision after the other.")
@click.option("--steps", default=40, show_default=True, help="Steps of each.")
@click.option("--seed", default=0, show_default=True)
@click.option("--family", "families", multiple=True, type=click.Choice(FAMILIES), help="[default: all]")
@click.option("--out", type=click.Path(path_type=Path), help="The report.")
def main(cases: int, steps: int, seed: int, families: tuple[str, ...], out: Path | None) -> None:
    """Run the machines, and open what they undid."""
    torch.set_num_threads(1)
    tally = Tally("After up to 50 edits in any order, undoing them gives back the bytes of every parameter.")
    ran: list[tuple[str, str]] = []
    for number in range(cases):
        for i, family in enumerate(families or FAMILIES):
            dtype = DTYPES[(i + number) % len(DTYPES)]
            tally.count(f"random order, {dtype}", [family, number, seed], run(family, dtype, number, steps, seed))
            ran += [(family, dtype)] if (family, dtype) not in ran else []
            print(number, family, dtype, flush=True)
    fresh(tally, ran)
    tally.finish(out, seed=seed, steps=dict(sorted(UndoMachine.counts.items())))


def run(family: str, dtype: str, number: int, steps: int, seed: int) -> str | None:
    """Run one machine; say how it failed, and None where it did not."""
    machine = UndoMachine()
    machine.families, machine.dtypes = (family,), (dtype,)
    try:
        walk(machine, random.Random(f"{family} {dtype} {number} {seed}"), steps)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


def fresh(tally: Tally, pairs: list[tuple[str, str]]) -> None:
    """Open one undone checkpoint of each family and precision in a process of its own."""
    folders = [str(folder) for pair in pairs for folder in (base_of(*pair), undone_checkpoint(*pair))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", FRESH, *folders]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    answers = done.stdout.split()
    for i, pair in enumerate(pairs):
        answer = answers[i] if i < len(answers) else (done.stderr.strip().splitlines() or ["no answer"])[-1]
        tally.count("opened by a fresh process", list(pair), None if answer == "same" else answer)


if __name__ == "__main__":
    main()
