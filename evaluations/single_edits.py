"""One edit at a time: the figures of `ffedit apply` over many counterfactual edits.

    python evaluations/single_edits.py [--model atlas] [--split reporting] [--limit N] [--layer auto|N] [--set
    NAME=VALUE …]

Each fact is traced, edited, measured before and after, and undone before the next. Writes the report as JSON.
"""

import json
import time
from dataclasses import replace
from pathlib import Path

import click

import ffedit
from ffedit.choice import by_trace
from ffedit.editor.rome import versions
from ffedit.evaluator import mean_scores
from ffedit.formats import parse_record

HERE = Path(__file__).parent


@click.command()
@click.option("--model", default="atlas", show_default=True)
@click.option("--data", default=str(HERE / "atlas-counterfact.json"))
@click.option("--split", default="reporting", show_default=True)
@click.option("--limit", type=int, help="Only the first edits.")
@click.option("--layer", default="auto", show_default=True)
@click.option("--corpus", type=click.Path(path_type=Path), help="Text for the key statistics.")
@click.option("--set", "settings", multiple=True, help="NAME=VALUE of EditConfig.")
@click.option("--out", type=click.Path(path_type=Path), help="Report, without suffix.")
def main(
    model: str,
    data: str,
    split: str,
    limit: int | None,
    layer: str,
    corpus: Path | None,
    settings: tuple[str, ...],
    out: Path | None,
) -> None:
    """Edit, measure, undo, for each fact of the split."""
    editable = ffedit.load(model)
    config = ffedit.EditConfig()
    for setting in settings:
        name, _, value = setting.partition("=")
        config = replace(config, **{name: type(getattr(config, name))(json.loads(value))})
    records = [r for r in json.loads(Path(data).read_text()) if r["split"] == split][:limit]
    facts = [parse_record(record) for record in records]
    text = ffedit.Corpus(corpus) if corpus else None
    rows, seconds = [], {"locate": 0.0, "edit": 0.0, "evaluate": 0.0}
    for i, fact in enumerate(facts):
        started = time.perf_counter()
        chosen = by_trace(editable, [fact], config.seed).layer if layer == "auto" else int(layer)
        traced = time.perf_counter()
        edit = ffedit.edit(editable, [fact], layers=[chosen], config=config, corpus=text)
        edited = time.perf_counter()
        report = ffedit.evaluate(editable, [fact], edit)
        seconds["locate"] += traced - started
        seconds["edit"] += edited - traced
        seconds["evaluate"] += time.perf_counter() - edited
        rows.append((fact, chosen, edit.provenance["norm_ratio"], report))
        if (i + 1) % 20 == 0:
            print(f"{i + 1}/{len(facts)}", flush=True)
    before = mean_scores(report.before for *_, report in rows)
    after = mean_scores(report.after for *_, report in rows if report.after)
    layers = sorted({chosen for _, chosen, *_ in rows})
    summary = {
        "model": model,
        "split": split,
        "edits": len(rows),
        "layers": {str(n): sum(chosen == n for _, chosen, *_ in rows) for n in layers},
        "config": {**config.__dict__},
        "before": before.to_dict(),
        "after": after.to_dict(),
        "seconds_per_edit": {name: value / len(rows) for name, value in seconds.items()},
        "versions": versions(),
    }
    for name, value in before.to_dict().items():
        print(f"{name:24s} {number(value)} -> {number(after.to_dict()[name])}")
    print(
        "layers",
        summary["layers"],
        "seconds per edit",
        {k: round(v, 2) for k, v in summary["seconds_per_edit"].items()},
    )
    if out:
        cases = [
            {
                "case_id": fact.case_id,
                "relation": fact.relation,
                "subject": fact.subject,
                "layer": chosen,
                "norm_ratio": ratio,
                "before": report.before.to_dict(),
                "after": report.after.to_dict() if report.after else None,
                "says": report.facts_after[0].says if report.facts_after else None,
            }
            for fact, chosen, ratio, report in rows
        ]
        out.with_suffix(".json").write_text(json.dumps({**summary, "cases": cases}, indent=1) + "\n")


def number(value: float | None) -> str:
    """A score to three places, or a dash."""
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
