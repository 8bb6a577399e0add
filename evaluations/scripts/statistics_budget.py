"""How much text do key statistics need? Atlas, text that it samples itself.

    python evaluations/scripts/statistics_budget.py [--budget TOKENS …] [--limit N] --out DIR

Facts of the tuning split, one for each subject. Their values are chosen once, at the layer that tracing all of them
chooses; for each budget they are solved for anew, one by one and all as one batch, and measured. Same facts, layer,
values and seed for every budget.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
from common import facts_of, keep, number, table

import ffedit
from ffedit.editor.provenance import versions
from ffedit.evaluator import mean_scores
from ffedit.facts.fact import by_subject


@click.command()
@click.option("--model", default="atlas", show_default=True)
@click.option("--budget", "budgets", multiple=True, type=int, default=(10_000, 100_000, 1_000_000), show_default=True)
@click.option("--limit", default=50, show_default=True, help="How many facts.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Report, without suffix.")
def main(model: str, budgets: tuple[int, ...], limit: int, out: Path) -> None:
    """Choose values, and for each budget collect, solve, measure."""
    editable = ffedit.load(model)
    facts = [group[0] for group in by_subject(facts_of("tuning"))][:limit]
    layer = ffedit.locate_all(editable, facts).layer
    values = [ffedit.edit(editable, [fact], "memit", layers=[layer]) for fact in facts]
    report = {"model": model, "layer": layer, "facts": len(facts), "versions": versions(), "budgets": []}
    rows = []
    for tokens in budgets:
        started = time.perf_counter()
        stats = ffedit.collect_stats(editable, [layer], corpus=ffedit.Corpus(tokens=tokens))
        (moments,) = stats.values()
        alone = []
        for fact, value in zip(facts, values, strict=True):
            edit = ffedit.combine(editable, [value], "memit", stats=stats)
            alone.append(ffedit.evaluate(editable, [fact], edit).after)
        batch = ffedit.evaluate(editable, facts, ffedit.combine(editable, values, "memit", stats=stats)).after
        single = mean_scores(scores for scores in alone if scores)
        assert batch
        report["budgets"].append(
            {
                "tokens": tokens,
                "seconds": moments.seconds,
                "whole_seconds": time.perf_counter() - started,
                "convergence": moments.convergence,
                "condition": moments.condition,
                "single": single.to_dict(),
                "batch": batch.to_dict(),
            }
        )
        keep(out.with_suffix(".json"), report)
        words = f"{tokens:,}", f"{moments.seconds:.0f}", number(moments.convergence)
        rows += [((*words, "one by one"), single), ((*words, "one batch"), batch)]
        print(table(rows[-2:], ("tokens", "seconds", "convergence", f"{len(facts)} facts")), flush=True)
    text = table(rows, ("tokens", "seconds", "convergence", f"{len(facts)} facts"))
    out.with_suffix(".md").write_text(f"{model}, layer {layer}, tuning split\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
