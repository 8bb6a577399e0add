"""One edit at a time: the figures of `ffedit apply` over many counterfactual edits.

    python evaluations/scripts/single_edits.py [--model atlas] [--limit N] [--method memit] --out FILE

Each fact is traced, edited, measured before and after, and undone before the next. The report grows with every ten
facts; a second run goes on where the first stopped.
"""

import json
import time
from collections import Counter
from pathlib import Path
from statistics import fmean

import click
from common import DATA_FOLDER, SHOWN, configured, facts_of, keep, number, sharing, table

import ffedit
from ffedit.editor.provenance import versions
from ffedit.evaluator import Scores, mean_scores

KEPT_EVERY = 10


@click.command()
@click.option("--model", default="atlas", show_default=True)
@click.option("--data", type=click.Path(path_type=Path), help="Facts; the default is the embedded model's own.")
@click.option("--split", default="reporting", show_default=True)
@click.option("--limit", type=int, help="Only the first edits.")
@click.option("--layer", default="auto", show_default=True)
@click.option("--method", default="memit", show_default=True)
@click.option("--corpus", help="Text for the key statistics.")
@click.option("--set", "settings", multiple=True, help="Another number: value.steps=20.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Report, without suffix.")
def main(
    model: str,
    data: Path | None,
    split: str,
    limit: int | None,
    layer: str,
    method: str,
    corpus: str | None,
    settings: tuple[str, ...],
    out: Path,
) -> None:
    """Edit, measure, undo, for each fact of the split."""
    editable, config = ffedit.load(model), configured(settings)
    facts, place = facts_of(split, limit, data or DATA_FOLDER / f"{model}-counterfact.json"), out.with_suffix(".json")
    asked = {"model": model, "split": split, "method": method, "layer": layer, "corpus": corpus}
    asked = json.loads(json.dumps({**asked, "config": config.to_dict()}))
    report = json.loads(place.read_text()) if place.exists() else {}
    if {name: report.get(name) for name in asked} != asked:
        report = {**asked, "versions": versions(), "cases": []}
    cases = report["cases"]
    stats = ffedit.Corpus(corpus)
    for fact in facts[len(cases) :]:
        started = time.perf_counter()
        chosen = ffedit.locate(editable, fact, seed=config.seed).layer if layer == "auto" else int(layer)
        traced = time.perf_counter()
        edit = ffedit.edit(editable, [fact], method, layers=[chosen], config=config, stats=stats)
        edited = time.perf_counter()
        measured = ffedit.evaluate(editable, [fact], edit)
        seconds = {"locate": traced - started, "edit": edited - traced, "evaluate": time.perf_counter() - edited}
        assert measured.after is not None and measured.facts_after is not None
        cases.append(
            {
                "case_id": fact.case_id,
                "relation": fact.relation,
                "subject": fact.subject,
                "layer": chosen,
                "norm_ratio": edit.provenance["norm_ratio"],
                "before": measured.before.to_dict(),
                "after": measured.after.to_dict(),
                "says": measured.facts_after[0].says,
                "seconds": seconds,
            }
        )
        if len(cases) % KEPT_EVERY == 0 or len(cases) == len(facts):
            keep(place, report)
            after = mean_scores(Scores(**case["after"]) for case in cases)
            print(f"{len(cases)}/{len(facts)}", *(f"{n} {number(getattr(after, n))}" for n in SHOWN), flush=True)
    means = {when: mean_scores(Scores(**case[when]) for case in cases) for when in ("before", "after")}
    spent = {name: fmean(case["seconds"][name] for case in cases) for name in ("locate", "edit", "evaluate")}
    report["edits"], report["layers"] = len(cases), dict(Counter(str(case["layer"]) for case in cases))
    report |= {when: scores.to_dict() for when, scores in means.items()} | {"seconds_per_edit": spent}
    keep(place, report)
    text = table([((when,), scores) for when, scores in means.items()], [f"{len(cases)} edits"])
    text = f"{sharing(facts)}\n\n{text}"
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text, "seconds per edit", {name: round(value, 2) for name, value in spent.items()})


if __name__ == "__main__":
    main()
