"""One edit after another on the same model, by every method, on Atlas.

    python evaluations/sequences.py [--count 200] [--methods rome,alphaedit] --out evaluations/sequences

Every fact is written on top of all those before it, with the key statistics of the unedited model. It is scored right
after its own edit and again after the last one: what later edits destroy shows in the difference. `alphaedit` keeps the
keys of the earlier edits. Every edit is kept beside the report in a folder: a second run goes on where the first
stopped.
"""

import json
import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import click
import torch
from common import SHOWN, configured, facts_of, keep, number, table

import ffedit
from ffedit.choice import by_trace
from ffedit.editor import tokens_for
from ffedit.editor.provenance import versions
from ffedit.evaluator import Evaluation, Scores, mean_scores

TRACED, TOLD = 30, 20


@click.command()
@click.option("--model", default="atlas", show_default=True)
@click.option("--split", default="reporting", show_default=True)
@click.option("--count", default=200, show_default=True)
@click.option("--methods", default="rome,alphaedit", show_default=True)
@click.option("--set", "settings", multiple=True, help="NAME=VALUE of EditConfig.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Report, without suffix.")
def main(model: str, split: str, count: int, methods: str, settings: tuple[str, ...], out: Path) -> None:
    """Write the facts one by one and measure."""
    config, facts = configured(settings), facts_of(split, count)
    place = out.with_suffix(".json")
    report = json.loads(place.read_text()) if place.exists() else {"rows": []}
    asked = {"model": model, "split": split, "config": asdict(config), "facts": len(facts)}
    if any(report.get(name) != json.loads(json.dumps(value)) for name, value in asked.items()):
        report = {**asked, "versions": versions(), "rows": []}
    for method in methods.split(","):
        if any(row["method"] == method for row in report["rows"]):
            continue
        editable = ffedit.load(model)
        layer = by_trace(editable, facts_of("tuning", TRACED), config.seed).layer
        text = ffedit.Corpus(tokens=tokens_for(len(facts)), seed=config.seed)
        stats, memory = ffedit.stats(editable, [layer], text), editable.memories[layer]
        whole, original = Evaluation(editable, facts), memory.value.clone()
        before = mean_scores(one.scores for one in whole.scores())
        edits, at_edit, ratios, started = [], [], [], time.perf_counter()
        folder = out.with_suffix("") / f"{method}-{sha256(json.dumps(asked).encode()).hexdigest()[:8]}"
        for i, fact in enumerate(facts):
            saved = folder / f"{i:04d}"
            if not saved.exists():
                alone = Evaluation(editable, [fact])
                kept = edits if method == "alphaedit" else ()
                made = ffedit.edit(editable, [fact], method, [layer], config, stats, after=kept)
                with made.applied(editable):
                    (scored,) = (one.scores for one in alone.scores())
                made.noted(at_edit=scored.to_dict()).save(saved)
            edit = ffedit.Edit.load(saved)
            edit.apply_(editable)
            edits.append(edit)
            at_edit.append(Scores(**edit.provenance["at_edit"]))
            ratios.append(float((memory.value - original).norm() / original.norm()))
            if (i + 1) % TOLD == 0:
                print(method, i + 1, *(f"{n} {number(getattr(mean_scores(at_edit), n))}" for n in SHOWN), flush=True)
        row = {
            "method": method,
            "layer": layer,
            "seconds": time.perf_counter() - started,
            "finite": bool(torch.isfinite(memory.value).all()),
            "norm_ratio": ratios,
            "before": before.to_dict(),
            "at_edit": mean_scores(at_edit).to_dict(),
            "end": mean_scores(one.scores for one in whole.scores()).to_dict(),
        }
        report["rows"].append(row)
        keep(place, report)
    rows = []
    for row in report["rows"]:
        for when in ("before", "at_edit", "end"):
            rows.append(((row["method"], when), Scores(**row[when])))
    out.with_suffix(".md").write_text(table(rows, ("method", "measured")), encoding="utf-8")


if __name__ == "__main__":
    main()
