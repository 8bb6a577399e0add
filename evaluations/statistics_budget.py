"""How much text do key statistics need? Atlas, text that it samples itself.

    python evaluations/statistics_budget.py [--budget TOKENS …] [--limit N] [--method NAME] [--out FILE.json]

For each budget: the convergence at every layer, and single edits of the tuning split at the layer that tracing chooses
over all of them, measured and undone one by one. The same facts, seed and layer for every budget.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
from common import facts_of, keep, number

import ffedit
from ffedit.choice import by_trace
from ffedit.evaluator import mean_scores

SCORES = ("efficacy", "paraphrase", "specificity", "same_subject", "score", "drift")


@click.command()
@click.option("--model", default="atlas", show_default=True)
@click.option("--budget", "budgets", multiple=True, type=int, default=(10_000, 100_000, 1_000_000), show_default=True)
@click.option("--limit", default=20, show_default=True, help="How many edits.")
@click.option("--method", default="rome", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON.")
def main(model: str, budgets: tuple[int, ...], limit: int, method: str, out: Path | None) -> None:
    """Collect with each budget, edit, measure."""
    editable = ffedit.load(model)
    facts = facts_of("tuning", limit)
    layer = by_trace(editable, facts).layer
    rows = []
    for tokens in budgets:
        started = time.perf_counter()
        stats = ffedit.stats(editable, corpus=ffedit.Corpus(tokens=tokens))
        collected = time.perf_counter() - started
        reports = []
        for fact in facts:
            edit = ffedit.edit(editable, [fact], method, [layer], stats=stats)
            reports.append(ffedit.evaluate(editable, [fact], edit))
        before = mean_scores(report.before for report in reports).to_dict()
        after = mean_scores(report.after for report in reports if report.after).to_dict()
        rows.append(
            {
                "tokens": tokens,
                "seconds": collected,
                "layers": [
                    {"layer": str(at), "convergence": moments.convergence, "condition": moments.condition}
                    for at, moments in stats.items()
                ],
                "before": before,
                "after": after,
            }
        )
        print(f"{tokens:,} tokens, {collected:.0f} s; {len(facts)} edits at layer {layer} ({method})")
        print("    convergence  ", "  ".join(f"{at}: {number(m.convergence)}" for at, m in stats.items()))
        print("    scores       ", "  ".join(f"{name} {number(after[name])}" for name in SCORES), flush=True)
    if out:
        report = {"model": model, "method": method, "layer": layer, "edits": len(facts), "budgets": rows}
        keep(out, report)


if __name__ == "__main__":
    main()
