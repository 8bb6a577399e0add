"""Time a user's waits: the first `ffedit apply` on a model, a later one, an edit alone, and fifty facts at once.

    python evaluations/benchmarks/seconds.py [--model NAME] [--data FACTS.json] [--rounds 3] [--stages] [--out FILE]

The first command of a round begins with an empty cache, so it reads the model and collects statistics. Each command is
a process of its own; seconds and peak memory are medians of the rounds. With `--stages` each command runs once more
with `--log`, which lists the seconds of its stages, their products, and their share of this machine's own speed;
counting products takes time itself, most in a small model. The edits are made in this process, loaded and warm, and
their products are counted in a run of their own. With `--published STEPS`, this many of the 25 steps of the published
procedure, a plain loop of whole passes (`evaluations/scripts/rivals.py`), are timed on the same fact. Run it on an idle
machine, because the figures are by the clock.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from measuring import finish, load_before, machine

import ffedit
from ffedit.cli.work.stages import Products, fastest_products
from ffedit.editor.statistics import text_for
from ffedit.layer_choice.published import auto_layer

HERE = Path(__file__).parents[1]
FACT = HERE.parent / "edits" / "eiffel-tower.json"
PUBLISHED_STEPS = 25


def run(command: list[str]) -> dict[str, Any]:
    """Return the seconds of a command, the start of Python included, and its peak memory in bytes."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(command)}: failed")
    return {"seconds": seconds, "peak": usage.ru_maxrss * 1024}


def stages_of(command: list[str], log: Path) -> list[str]:
    """Return one line for each stage of a command, from a run that counts its products."""
    log.unlink(missing_ok=True)
    run([*command, "--log", str(log)])
    lines = [line.partition("ffedit.cli.work.stages: ")[2] for line in log.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line]


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Return seconds, the operations of products (counted in a second run), and their share of the machine's speed."""
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    with Products() as products:
        work()
    operations = products.operations
    return {"seconds": seconds, "operations": operations, "share": operations / seconds / fastest_products()}


def shape_of(editable: ffedit.Editable, layer: int) -> dict[str, Any]:
    """Return what the seconds depend on: weights and their bytes, layers, the layer that is edited, and its widths."""
    parameters = list(editable.model.parameters())
    d_model, d_ff = editable.memories[layer].shape
    return {
        "weights": sum(p.numel() for p in parameters), "bytes": sum(p.numel() * p.element_size() for p in parameters),
        "layers": len(editable.layers), "layer": layer, "d_model": d_model, "d_ff": d_ff,
        "layer_weights": sum(p.numel() for p in editable.layers[layer].parameters()),
        "dtype": str(editable.model.dtype).removeprefix("torch."),
    }  # fmt: skip


def size_of(folder: str) -> int:
    """Return the bytes of the files in a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


@click.command(help=__doc__)
@click.option("--model", default="smollm2", show_default=True)
@click.option("--data", default=HERE / "data/smollm2-counterfact.json", type=click.Path(exists=True, path_type=Path))
@click.option("--count", default=50, show_default=True, help="Facts at once, of different subjects; 0: none.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--stages", is_flag=True, help="Run each command once more, for the seconds of its stages.")
@click.option("--published", default=0, show_default=True, help="Steps of the published procedure to time.")
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file to write the figures to.")
def main(model: str, data: Path, count: int, rounds: int, stages: bool, published: int, out: Path | None) -> None:
    """Time the commands, then the edits inside one process."""
    threads = torch.get_num_threads()
    load = load_before(threads)
    report: dict[str, Any] = {"model": Path(model).name, "rounds": rounds}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ffedit", "apply", str(FACT), "--model", model]
        runs: dict[str, list[dict[str, Any]]] = {"first apply": [], "later apply": []}
        for i in range(rounds):
            os.environ["FFEDIT_CACHE"] = str(cache := Path(folder) / f"cache{i}")
            for name, timings in runs.items():
                timings.append(run(command))
                print(f"{name}, round {i + 1}: {timings[-1]['seconds']:.1f} s", flush=True)
        report["cache"] = size_of(str(cache))
        for name, timings in runs.items():
            report[name] = {key: median(timing[key] for timing in timings) for key in ("seconds", "peak")}
            print(f"{name}: {report[name]['seconds']:.1f} s, at most {report[name]['peak'] / 1e9:.1f} GB")
        if stages:
            os.environ["FFEDIT_CACHE"] = str(Path(folder) / "cache")
            for name in runs:
                report[name]["stages"] = stages_of(command, Path(folder) / "log")
                print("".join(f"    {line}\n" for line in (f"stages of {name}:", *report[name]["stages"])), end="")
        print(f"left in the cache: {report['cache'] / 1e9:.2f} GB", flush=True)
        editable = ffedit.load(model)
        layer = auto_layer(editable).layer
        report |= shape_of(editable, layer)
        stats = ffedit.collect_stats(editable, layers=[layer], corpus=text_for(editable, 1, 0))  # as `apply` left them
        facts = list({fact.subject: fact for fact in ffedit.read_facts(data)}.values())[: count + 1]
        ffedit.edit(editable, facts[-1:], layers=[layer], stats=stats)  # fills the caches
        for batch in (facts[:1], facts[:count]) if count else (facts[:1],):
            timings = [
                timed(lambda batch=batch: ffedit.edit(editable, batch, layers=[layer], stats=stats))
                for _ in range(rounds)
            ]
            figures = {key: median(timing[key] for timing in timings) for key in timings[0]}
            figures["seconds"] /= len(batch)
            report[f"edit of {len(batch)}"] = figures
            share = f"{100 * figures['share']:.0f} % of the speed"
            print(f"edit of {len(batch)}: {figures['seconds']:.2f} s a fact, {share}")
        if published:
            report["published"] = loop = published_loop(editable, facts[0], layer, stats, published)
            times = loop["seconds"] / report["edit of 1"]["seconds"]
            steps = f"{published} of {PUBLISHED_STEPS} steps, in proportion"
            print(f"published, {steps}: {loop['seconds']:.1f} s, {times:.1f} times as long")
    finish(out, machine(threads, load) | report, True)


def published_loop(
    editable: ffedit.Editable, fact: ffedit.Fact, layer: int, stats: Any, steps: int
) -> dict[str, float]:
    """Return the seconds of all steps of the published procedure, in proportion to the `steps` that are run."""
    sys.path.append(str(HERE / "scripts"))
    from rivals import PUBLISHED, published_rome, sampled_prefixes

    ((_, moments),) = stats.items()
    prefixes = sampled_prefixes(editable, PUBLISHED)

    def once(count: int) -> dict[str, float]:
        return timed(lambda: published_rome(editable, fact, layer, moments.C, prefixes, count))

    first, several = once(1), once(steps)
    step = (several["seconds"] - first["seconds"]) / max(1, steps - 1) if steps > 1 else first["seconds"]
    return {"seconds": first["seconds"] + step * (PUBLISHED_STEPS - 1), "a step": step, "share": several["share"]}


if __name__ == "__main__":
    main()
