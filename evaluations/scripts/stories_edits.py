"""A model that ffedit was never tuned on: edits of what a small TinyStories model reliably says, one at a time.

    python evaluations/scripts/stories_edits.py --model MODEL [--set NAME=VALUE] [--out FILE]

MODEL is karpathy/tinyllamas `stories260K` as a transformers checkpoint: a Llama of 260,032 parameters, 5 layers of 64
dimensions and d_ff 172. The facts (`stories-edits.jsonl`, made by `make_stories_edits.py`) are asked for stability
again; then each is traced, edited, measured before and after as by `ffedit apply`, with the defaults, and undone.
"""

import time
from collections import Counter
from pathlib import Path
from statistics import fmean

import click
from common import REPORTS, configured, keep, number, table
from make_stories_edits import DATA, stability

import ffedit
from ffedit.editor.provenance import versions
from ffedit.editor.statistics import text_for
from ffedit.evaluator import Scores, mean_scores
from ffedit.safety.guardrails import breaches


@click.command()
@click.option("--model", required=True, help="Folder of the model.")
@click.option("--data", default=DATA, type=click.Path(path_type=Path))
@click.option("--layer", default="auto", show_default=True)
@click.option("--method", default="memit", show_default=True)
@click.option("--set", "settings", multiple=True, help="Another number: value.steps=20.")
@click.option(
    "--out", default=REPORTS / "stories-edits", type=click.Path(path_type=Path), help="Report, without suffix."
)
def main(model: str, data: Path, layer: str, method: str, settings: tuple[str, ...], out: Path) -> None:
    """Edit, measure, undo, for each fact."""
    editable, config, facts = ffedit.load(model), configured(settings), ffedit.read_facts(data)
    stats, cases = text_for(editable, 1, config.seed), []
    for fact in facts:
        known = stability(editable, [fact.text, *fact.paraphrase_texts])
        started = time.perf_counter()
        traces = ffedit.locate_all(editable, [fact], seed=config.seed)
        chosen = traces.layer if layer == "auto" else int(layer)
        edit = ffedit.edit(editable, [fact], method, layers=[chosen], config=config, stats=stats)
        measured = ffedit.evaluate(editable, [fact], edit)
        assert measured.after is not None and measured.facts_after is not None
        cases.append(
            {
                "case_id": fact.case_id,
                "relation": fact.relation,
                "prompt": fact.text,
                "previous": fact.previous,
                "target": fact.target,
                "stable": all(word == fact.previous for word, _ in known),
                "probability": fmean(p for _, p in known),
                "noise_takes": 1 - traces.traces[0].corrupted / traces.traces[0].clean,
                "layer": chosen,
                "norm_ratio": edit.provenance["norm_ratio"],
                "before": measured.before.to_dict(),
                "after": measured.after.to_dict(),
                "says": measured.facts_after[0].says,
                "guardrails": {breach.limit: breach.value for breach in breaches(editable, edit, measured)},
                "seconds": time.perf_counter() - started,
            }
        )
    means = {when: mean_scores(Scores(**case[when]) for case in cases) for when in ("before", "after")}
    relations = dict.fromkeys(case["relation"] for case in cases)
    groups = {name: [case for case in cases if case["relation"] == name] for name in relations}
    by_relation = {name: mean_scores(Scores(**case["after"]) for case in some) for name, some in groups.items()}
    report = {
        "model": Path(model).name,
        "method": method,
        "config": config.to_dict(),
        "versions": versions(),
        "edits": len(cases),
        "stable": fmean(case["stable"] for case in cases),
        "layers": dict(Counter(str(case["layer"]) for case in cases)),
        "guardrails": dict(Counter(limit for case in cases for limit in case["guardrails"])),
        "seconds_per_edit": fmean(case["seconds"] for case in cases),
        **{when: scores.to_dict() for when, scores in means.items()},
        "by_relation": {name: scores.to_dict() for name, scores in by_relation.items()},
    }
    keep(out.with_suffix(".json"), {**report, "cases": cases})
    rows = [((f"all {len(cases)}, {when}",), scores) for when, scores in means.items()]
    rows += [((f"{name}, {len(groups[name])}",), scores) for name, scores in by_relation.items()]
    text = f"{table(rows, ['edits'])}\n{listing(cases)}"
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def listing(cases: list[dict]) -> str:
    """Each edit on a line of its own; `noise takes` is how much of p is lost when the subject is corrupted."""
    head = [
        "prompt",
        "previous (p) → new",
        "noise takes",
        "layer",
        "says now",
        "paraphrase",
        "specificity",
        "drift",
        "guardrails",
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for case in cases:
        scores = [number(case["after"][name]) for name in ("paraphrase", "specificity", "drift")]
        change = f"{case['previous']} ({case['probability']:.2f}) → {case['target']}"
        place = [f"{case['noise_takes']:.0%}", str(case["layer"])]
        cells = [case["prompt"], change, *place, case["says"], *scores, ", ".join(case["guardrails"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
