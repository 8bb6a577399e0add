"""Long runs: thousands of edits in one process, in which memory, open files and threads do not grow.

    python evaluations/reliability/long.py --cases 3000 --out evaluations/reports/reliability/long.json

A case is one edit of a tiny trained model: computed, saved, loaded, applied, evaluated and undone, and at every tenth
exported, reopened, and undone on the disk. An edit takes a real model ten seconds, so that 3,000 are eight hours.
After each, resident memory, open files, threads and live tensors are counted. The first tenth is warming up; behind it
a straight line is laid through each count.
"""

import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import click
import numpy as np
import psutil
import torch
import transformers
from tally import Tally

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))

import zoo
from making import check_here
from shell import save_model
from storing import BARE
from writing import CORPUS, quick

import ffedit
from ffedit import Edit, Fact
from ffedit.exporter import exporting
from ffedit.model.editable import Editable

FAMILIES = ("gpt2", "llama")
LAYER, EXPORT_EVERY, TENSORS_EVERY = 1, 10, 10
# How much each may grow for one edit, by the slope of the line: memory's allocator is never quite still.
MOST = {"resident bytes": 2048.0, "open files": 1e-3, "threads": 1e-3, "live tensors": 1e-2}


@click.command(help=__doc__)
@click.option("--cases", default=3000, show_default=True, help="Edits.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="The report.")
def main(cases: int, seed: int, out: Path | None) -> None:
    """Edit, and count what is held."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    exporting.check_fresh = check_here
    tally = Tally("In a long run resident memory, open files, threads and live tensors do not grow.")
    held: dict[str, list[tuple[int, float]]] = {name: [] for name in MOST}
    with tempfile.TemporaryDirectory(prefix="ffedit-long-") as place:
        os.environ["FFEDIT_CACHE"] = str(Path(place) / "cache")
        models = [ffedit.load(save_model(zoo.trained(family, True), Path(place) / family)) for family in FAMILIES]
        stats = [ffedit.collect_stats(editable, [LAYER], corpus=CORPUS) for editable in models]
        before = [zoo.snapshot(editable) for editable in models]
        started = time.perf_counter()
        for i in range(cases):
            which = (seed + i) % len(models)
            one_edit(models[which], stats[which], i + seed, Path(place), i % EXPORT_EVERY == EXPORT_EVERY - 1)
            same = zoo.unchanged(models[which], before[which])
            tally.count(
                "edited and undone", [i, FAMILIES[which]], None if same else "the weights are not what they were"
            )
            for name, count in counted(i % TENSORS_EVERY == 0).items():
                held[name].append((i, count))
            if i % 100 == 99:
                seen = {name: counts[-1][1] for name, counts in held.items()}
                print(f"{i + 1} edits, {time.perf_counter() - started:.0f} s, {seen}", flush=True)
    slopes = {}
    for name, counts in held.items():
        x, y = np.array([pair for pair in counts if pair[0] >= cases // 10], float).T
        slope = float(np.polyfit(x, y, 1)[0])
        slopes[name] = {"first": y[0], "last": y[-1], "least": y.min(), "most": y.max(), "by edit": slope}
        fault = f"{slope:.4g} more with each edit, at most {MOST[name]:g} expected" if slope > MOST[name] else None
        tally.count(f"{name} do not grow", [cases, seed], fault)
    tally.finish(out, seed=seed, held=slopes, most_by_edit=MOST)


def one_edit(editable: Editable, stats: object, number: int, place: Path, exports: bool) -> None:
    """Do all that a session does with one fact."""
    subject, _ = zoo.KNOWN[number // 2 % len(zoo.KNOWN)]
    template = zoo.TEMPLATES[number // 16 % len(zoo.TEMPLATES)]
    others = [other for other in ("Paris", "Rome", "Berlin", "Madrid", "Egypt") if other != zoo.KNOWN[number % 8][1]]
    fact = Fact(subject, template, others[number // 48 % len(others)])
    method = ("rome", "memit")[number // 7 % 2]
    edit = ffedit.edit(editable, [fact], method, layers=[LAYER], config=quick(**BARE, steps=2), stats=stats)
    edit.save(place / "edit", force=True)
    edit = Edit.load(place / "edit")
    edit.apply_(editable)
    edit.undo_(editable)
    ffedit.evaluate(editable, [fact], edit)
    if exports:
        folder = ffedit.export(editable, edit, place / "edited").folder
        again = ffedit.load(folder)
        edit.undo_(again)
        ffedit.undo(folder, place / "undone")
        for made in (folder, place / "undone"):
            shutil.rmtree(made)


def counted(tensors: bool) -> dict[str, float]:
    """What this process holds; tensors, which take time to find, only where they are asked for."""
    threads, files = psutil.Process().num_threads(), len(os.listdir("/proc/self/fd"))
    found = {"resident bytes": psutil.Process().memory_info().rss, "open files": files, "threads": threads}
    assert threads >= threading.active_count()
    if tensors:
        gc.collect()
        # By type: `isinstance` would wake what loads lazily.
        found["live tensors"] = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return {name: float(count) for name, count in found.items()}


if __name__ == "__main__":
    main()
