"""Undo is exact: bytes of every parameter after 1 to 50 edits, in every family and precision, in random order.

    python evaluations/reliability/undo.py --cases 3 --out evaluations/reports/reliability/undo.json

A case is a run of a state machine (`tests/helpers/undoing.py`) on one family's tiny model in one precision: edits are
made, applied, added, combined, saved, loaded, exported, undone in memory and in checkpoints, and checkpoints reopened.
After each step all bytes are compared with what they must be, and in the end everything is undone. At last one fresh
process, without ffedit, opens an undone checkpoint of each family and precision.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import click
import torch
from tally import Tally

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))

from hypothesis import HealthCheck, Phase, seed as seeded, settings
from hypothesis.stateful import run_state_machine_as_test
from undoing import DTYPES, FAMILIES, UndoMachine, base_of, undone_checkpoint

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
@click.option("--cases", default=3, show_default=True, help="Runs for each family and precision.")
@click.option("--steps", default=30, show_default=True, help="Steps of a run.")
@click.option("--seed", default=0, show_default=True)
@click.option("--family", "families", multiple=True, type=click.Choice(FAMILIES), help="[default: all]")
@click.option("--out", type=click.Path(path_type=Path), help="The report.")
def main(cases: int, steps: int, seed: int, families: tuple[str, ...], out: Path | None) -> None:
    """Run the machines, and open what they undid."""
    torch.set_num_threads(1)
    tally = Tally("After up to 50 edits in any order, undoing them gives back the bytes of every parameter.")
    for family in families or FAMILIES:
        for dtype in DTYPES:
            run(tally, family, dtype, cases, steps, seed)
        fresh(tally, family)
        print(family, dict(tally.cases), flush=True)
    tally.finish(out, seed=seed, steps=dict(sorted(UndoMachine.counts.items())))


def run(tally: Tally, family: str, dtype: str, cases: int, steps: int, seed: int) -> None:
    """Count the runs of one machine; hypothesis ends them at the first failure."""
    ran: list[int] = []

    class Machine(UndoMachine):
        families, dtypes = (family,), (dtype,)

        def __init__(self) -> None:
            super().__init__()
            ran.append(1)

    how = settings(
        max_examples=cases,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    fault = None
    try:
        run_state_machine_as_test(seeded(seed)(Machine), settings=how)
    except Exception as error:
        traceback.print_exc()
        fault = f"{type(error).__name__}: {error}"
    for _ in range(max(0, min(len(ran), cases) - 1)):
        tally.count(f"random order, {dtype}", [family, dtype, seed])
    tally.count(f"random order, {dtype}", [family, dtype, seed], fault)


def fresh(tally: Tally, family: str) -> None:
    """Open one undone checkpoint of each precision in a process of its own."""
    folders = [(str(base_of(family, dtype)), str(undone_checkpoint(family, dtype))) for dtype in DTYPES]
    command = [sys.executable, "-c", FRESH, *(folder for pair in folders for folder in pair)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    answers = done.stdout.split()
    for i, dtype in enumerate(DTYPES):
        answer = answers[i] if i < len(answers) else (done.stderr.strip().splitlines() or ["no answer"])[-1]
        tally.count("opened by a fresh process", [family, dtype], None if answer == "same" else json.dumps(answer))


if __name__ == "__main__":
    main()
