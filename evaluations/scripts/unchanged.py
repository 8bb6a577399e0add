"""Check that a change of the code changes no result: digests of edits, scores and a trace, to the last bit.

    python evaluations/scripts/unchanged.py --out before.json  # at the commit before
    python evaluations/scripts/unchanged.py --out after.json --against before.json  # after: exits 1 if they differ

For each model: 20 facts edited one by one, 30 facts written at once (memit), one trace. Only the public API is used,
so that the script runs at both commits. Bits repeat on one machine with one number of threads, which is recorded.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

import ffedit

HERE = Path(__file__).parents[1] / "data"
MODELS = {"atlas": HERE / "atlas-counterfact.json", "smollm2": HERE / "smollm2-counterfact.json"}
# Layers are fixed, so that their choice plays no role; few tokens are read for C, to save time.
LAYER, TOKENS = {"atlas": 0, "smollm2": 4}, 4096
SINGLE, TOGETHER = 20, 30


@click.command(help=__doc__)
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), default=list(MODELS))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON file of the digests.")
@click.option("--against", type=click.Path(exists=True, path_type=Path), help="Digests to compare with.")
def main(models: Sequence[str], out: Path, against: Path | None) -> None:
    """Write the digests, and compare them."""
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    for name in models:
        results |= digests(name)
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if against is not None:
        before = json.loads(against.read_text(encoding="utf-8"))
        differing = [name for name in results if results[name] != before.get(name)]
        print("\n".join([f"{len(results) - len(differing)} of {len(results)} equal", *differing]))
        sys.exit(bool(differing))


def digests(name: str) -> dict[str, str]:
    """Return the digests of all results on one model, by name."""
    # If a dtype is named, statistics are computed in it, too, not in a faster one.
    editable, layer = ffedit.load(name, dtype="float32"), LAYER[name]
    facts = [fact for fact in ffedit.read_facts(MODELS[name]) if fact.previous][:TOGETHER]
    stats = ffedit.collect_stats(editable, [layer], corpus=ffedit.Corpus(None, TOKENS))
    results = {}
    for i, fact in enumerate(facts[:SINGLE]):
        edit = ffedit.edit(editable, [fact], layers=[layer], stats=stats)
        report = ffedit.evaluate(editable, [fact], edit)
        results[f"{name}, single {i}, {fact.subject}"] = digest(edit, report)
        print(name, i, fact.subject, flush=True)
    edit = ffedit.edit(editable, facts, "memit", layers=[layer], stats=stats)
    results[f"{name}, {len(facts)} at once"] = digest(edit, ffedit.evaluate(editable, facts, edit))
    trace = ffedit.locate(editable, facts[0])
    results[f"{name}, trace"] = short(np.asarray(trace.effects, dtype=np.float64).tobytes())
    return results


def digest(edit: ffedit.Edit, report: ffedit.Report) -> str:
    """Return a digest of the changes and the scores."""
    deltas = [delta.dense.double().numpy().tobytes() for _, delta in sorted(edit.updates.items(), key=str)]
    scores = json.dumps([report.before.to_dict(), report.after.to_dict()], sort_keys=True)
    return short(b"".join([*deltas, scores.encode()]))


def short(content: bytes) -> str:
    """Return a digest of 16 characters."""
    return hashlib.sha256(content).hexdigest()[:16]


if __name__ == "__main__":
    main()
