"""The same everywhere: one edit with one seed, in fresh processes, with other instructions and numbers of threads.

    python evaluations/reliability/same.py --out evaluations/reports/reliability/same.json
    python evaluations/reliability/same.py --model smollm2 --layer 8 --facts 1 --tokens 2048 --out ...

Every process edits the same facts one by one and scores them. Two processes that run alike, as the machine comes with
one number of threads, must give the same bits. Those with other instructions (what torch, oneDNN and MKL may use) or
another number of threads must give scores within 1e-4; whether their bits are the same is noted, not asked for. A
checkpoint exported by one must be undone by another.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from tally import Tally

DATA = Path(__file__).parents[1] / "data"
NEAR = 1e-4
# What limits the instructions, by name: torch's own kernels, oneDNN's, MKL's.
CAPABILITIES = {
    "as it comes": {},
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_CBWR": "AVX512"},
}


@click.command(help=__doc__)
@click.option("--model", default="atlas", show_default=True, type=click.Choice(["atlas", "smollm2"]))
@click.option("--layer", default=0, show_default=True)
@click.option("--cases", "--facts", "count", default=5, show_default=True, help="Facts.")
@click.option("--tokens", default=4096, show_default=True, help="Of the text that C is collected on.")
@click.option("--method", default="memit", show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", "counts", multiple=True, type=int, default=[1, 2], show_default=True)
@click.option("--instructions", multiple=True, type=click.Choice(list(CAPABILITIES)), default=list(CAPABILITIES))
@click.option("--out", type=click.Path(path_type=Path), help="The report.")
@click.option("--work", is_flag=True, hidden=True, help="Be one of the processes.")
@click.option("--undo", type=click.Path(path_type=Path), hidden=True, help="Be the one that undoes a checkpoint.")
@click.option("--checkpoint", type=click.Path(path_type=Path), hidden=True)
def main(
    out: Path | None,
    work: bool,
    undo: Path | None,
    checkpoint: Path | None,
    counts: Sequence[int],
    instructions: Sequence[str],
    **what: Any,
) -> None:
    """Compare processes; or be one."""
    if undo is not None:
        print(json.dumps(undone(undo)))
        return
    if work:
        print(json.dumps(edited(checkpoint, **what)))
        return
    tally = Tally("Two runs of an edit with the same seed give the same bits; its scores agree everywhere to 1e-4.")
    words = [word for name, value in what.items() for word in (f"--{'cases' if name == 'count' else name}", str(value))]
    features = cpu_features()
    noted: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        first = None
        for threads in counts:
            for name in instructions:
                limits = CAPABILITIES[name]
                if name in ("avx2", "avx512") and name not in features:
                    continue
                case = {"threads": threads, "instructions": name, **what}
                folder = Path(place) / f"{threads}-{name}".replace(" ", "-")
                again = 1 if limits else 2
                one, *more = (
                    child([*words, "--work", "--checkpoint", str(folder / str(i))], threads, limits)
                    for i in range(again)
                )
                for two in more:
                    for i, (bits, others) in enumerate(zip(one["bits"], two["bits"], strict=True)):
                        fault = None if bits == others else f"edit {bits} in one process, {others} in another"
                        tally.count("two runs: the same bits", {**case, "fact": i}, fault)
                first = first or one
                for i, scores in enumerate(one["scores"]):
                    far = apart(first["scores"][i], scores)
                    fault = f"{far} from those of one thread" if far > NEAR else None
                    tally.count("elsewhere: the same scores", {**case, "fact": i}, fault)
                far = max(map(apart, first["scores"], one["scores"]))
                equal = sum(a == b for a, b in zip(first["bits"], one["bits"], strict=True))
                seen = {"edits of the same bits": equal, "of": len(one["bits"]), "largest difference of scores": far}
                noted[f"{threads} thread{'s'[: threads - 1]}, {name} ({one['capability']})"] = seen
                print(threads, name, seen, flush=True)
                # Exported there, undone here, as the machine comes.
                done = child(["--undo", str(folder / "0")], 1, {})
                tally.count("exported elsewhere: undone here", case, done["fault"])
    tally.finish(out, **what, compared_with_one_thread_as_it_comes=noted)


def child(words: list[str], threads: int, limits: dict[str, str]) -> Any:
    """Run this script in a process of its own, with a cache of its own: nothing computed elsewhere is used."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, **limits, "FFEDIT_CACHE": cache, "OMP_NUM_THREADS": str(threads)}
        environment["MKL_NUM_THREADS"] = str(threads)
        done = subprocess.run(
            [sys.executable, __file__, *words], env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def edited(
    checkpoint: Path | None, model: str, layer: int, count: int, tokens: int, method: str, seed: int
) -> dict[str, Any]:
    """Edit facts one by one and score them; export the last edit."""
    import torch

    import ffedit

    editable = ffedit.load(model)
    facts = [fact for fact in ffedit.read_facts(DATA / f"{model}-counterfact.json") if fact.previous][:count]
    config = ffedit.EditConfig(seed=seed)
    stats = ffedit.collect_stats(editable, [layer], corpus=ffedit.Corpus(None, tokens))
    bits, scores = [], []
    for fact in facts:
        edit = ffedit.edit(editable, [fact], method, layers=[layer], config=config, stats=stats)
        report = ffedit.evaluate(editable, [fact], edit)
        # The fingerprint is of every number of the edit.
        bits.append(edit.fingerprint())
        assert report.after is not None
        scores.append([leaves(report.before.to_dict()), leaves(report.after.to_dict())])
    if checkpoint is not None:
        ffedit.export(model, edit, checkpoint)
        (checkpoint / "weights.sha256").write_text(hashed(model_folder(editable)))
    return {"bits": bits, "scores": scores, "capability": torch.backends.cpu.get_cpu_capability()}


def undone(checkpoint: Path) -> dict[str, str | None]:
    """Undo the edit of a checkpoint that another process exported; its weights must be the base's files."""
    import ffedit

    with tempfile.TemporaryDirectory() as place:
        try:
            folder = ffedit.undo(checkpoint, Path(place) / "out").folder
        except ffedit.FFEditError as error:
            return {"fault": str(error)}
        same = hashed(folder) == (checkpoint / "weights.sha256").read_text()
    return {"fault": None if same else "the weights are not the base's"}


def model_folder(editable: Any) -> Path:
    """The folder that a model was loaded from."""
    from ffedit.loading.load import cached_folder

    folder = cached_folder(editable)
    assert folder is not None
    return Path(folder)


def hashed(folder: Path) -> str:
    """A hash of every tensor of a folder, whatever shard it is in."""
    from ffedit.files.tensor_ranges import contents

    digest = hashlib.sha256()
    for name, stored in sorted(contents(folder).items()):
        digest.update(f"{name}{stored.kind}{stored.shape}".encode())
        with stored.file.open("rb") as file:
            file.seek(stored.start)
            digest.update(file.read(stored.size))
    return digest.hexdigest()


def leaves(tree: Any) -> list[float]:
    """All numbers of a nested record, in its order."""
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in leaves(value)]
    if isinstance(tree, list | tuple):
        return [number for value in tree for number in leaves(value)]
    return [float(tree)] if isinstance(tree, int | float) else []


def apart(a: list[list[float]], b: list[list[float]]) -> float:
    """The largest difference of two facts' scores; infinite where one has more of them."""
    ours, theirs = ([*before, *after] for before, after in (a, b))
    if len(ours) != len(theirs):
        return float("inf")
    return max((abs(x - y) for x, y in zip(ours, theirs, strict=True) if x == x or y == y), default=0.0)


def cpu_features() -> set[str]:
    """The instruction sets that torch says this processor has, by the names that limit it to them."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return {"AVX512": {"avx2", "avx512"}, "AVX2": {"avx2"}}.get(done.stdout.strip(), set())


if __name__ == "__main__":
    main()
