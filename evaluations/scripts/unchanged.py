"""Show that a change of the code changes no result: digests of edits, scores and a trace, to the last bit.

    python evaluations/scripts/unchanged.py --out before.json  # at the commit before
    python evaluations/scripts/unchanged.py --out after.json --against before.json  # after: exits 1 if they differ

Of each model: 20 facts edited one by one, 30 facts written at once (memit), and one trace. Only the public API is used,
so that the script runs at both commits. Bits repeat on one machine with one number of threads, which is noted.
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
# The layer is named, so that choosing it is no part of this; and few tokens make C, to save time.
LAYER, TOKENS = {"atlas": 0, "smollm2": 4}, 4096
SINGLE, TOGETHER = 20, 30


@click.command(help=__doc__)
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), default=list(MODELS))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON file of the digests.")
@click.option("--against", type=click.Path(exists=True, path_type=Path), help="Digests to compare with.")
def main(models: Sequence[str], out: Path, against: Path | None) -> None:
    """Write the digests, and compare them."""
    found: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    for name in models:
        found |= digests(name)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if against is not None:
        before = json.loads(against.read_text(encoding="utf-8"))
        differing = [name for name in found if found[name] != before.get(name)]
        print("\n".join([f"{len(found) - len(differing)} of {len(found)} equal", *differing]))
        sys.exit(bool(differing))


def digests(name: str) -> dict[str, str]:
    """Digests of everything that is computed on one model, by what it is."""
    # Given a dtype, statistics are in it, too, and not in the one that happens to be faster.
    editable, layer = ffedit.load(name, dtype="float32"), LAYER[name]
    facts = [fact for fact in ffedit.read_facts(MODELS[name]) if fact.previous][:TOGETHER]
    stats = ffedit.collect_stats(editable, [layer], corpus=ffedit.Corpus(None, TOKENS))
    found = {}
    for i, fact in enumerate(facts[:SINGLE]):
        edit = ffedit.edit(editable, [fact], layers=[layer], stats=stats)
        report = ffedit.evaluate(editable, [fact], edit)
        found[f"{name}, single {i}, {fact.subject}"] = digest(edit, report)
        print(name, i, fact.subject, flush=True)
    edit = ffedit.edit(editable, facts, "memit", layers=[layer], stats=stats)
    found[f"{name}, {len(facts)} at once"] = digest(edit, ffedit.evaluate(editable, facts, edit))
    trace = ffedit.locate(editable, facts[0])
    found[f"{name}, trace"] = short(np.asarray(trace.effects, dtype=np.float64).tobytes())
    return found


def digest(edit: ffedit.Edit, report: ffedit.Report) -> str:
    """Return what was written and what was measured, in a few characters."""
    deltas = [delta.dense.double().numpy().tobytes() for _, delta in sorted(edit.updates.items(), key=str)]
    scores = json.dumps([report.before.to_dict(), report.after.to_dict()], sort_keys=True)
    return short(b"".join([*deltas, scores.encode()]))


def short(content: bytes) -> str:
    """A digest."""
    return hashlib.sha256(content).hexdigest()[:16]


if __name__ == "__main__":
    main()
