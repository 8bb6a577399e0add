"""Many facts at once: batches of growing size by every method, on Atlas.

    python evaluations/batch_edits.py [--sizes 10,30,100,300] [--per-subject 2] --out evaluations/batch-edits

The layer is the one that tracing 30 facts of the tuning split finds. Values do not depend on the batch: they are chosen
once for every fact, and each size and method is solved for them (`ffedit.combine`). Neighbors and same-subject prompts
whose own fact is in the batch do not count. `--per-subject 2` takes only subjects with at least so many facts. The
report grows with every row, and the values are kept beside it in a folder: a second run goes on where the first
stopped.
"""

import json
import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import click
from common import SHOWN, configured, facts_of, keep, number, table

import ffedit
from ffedit.choice import by_trace
from ffedit.editor import by_subject, tokens_for
from ffedit.editor.provenance import versions
from ffedit.evaluator import Scores

TRACED = 30


@click.command()
@click.option("--model", default="atlas", show_default=True)
@click.option("--split", default="reporting", show_default=True)
@click.option("--sizes", default="10,30,100,300", show_default=True)
@click.option("--methods", default="memit,emmet,alphaedit,ft,ft-l", show_default=True)
@click.option("--per-subject", default=1, show_default=True, help="Only subjects with so many facts.")
@click.option("--set", "settings", multiple=True, help="NAME=VALUE of EditConfig.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Report, without suffix.")
def main(
    model: str, split: str, sizes: str, methods: str, per_subject: int, settings: tuple[str, ...], out: Path
) -> None:
    """Edit, measure and forget, for every size and method."""
    editable, config = ffedit.load(model), configured(settings)
    layer = by_trace(editable, facts_of("tuning", TRACED), config.seed).layer
    groups = [group for group in by_subject(facts_of(split)) if len(group) >= per_subject]
    facts = [fact for group in groups for fact in group]
    place = out.with_suffix(".json")
    asked = {"model": model, "split": split, "layer": layer, "per_subject": per_subject, "config": asdict(config)}
    report = json.loads(place.read_text()) if place.exists() else {"rows": []}
    if any(report.get(name) != json.loads(json.dumps(value)) for name, value in asked.items()):
        report = {**asked, "d_ff": editable.memories[layer].d_ff, "versions": versions(), "rows": []}
    parts: list[ffedit.Edit] = []
    for size in map(int, sizes.split(",")):
        written = sum(len(part.facts) for part in parts)
        # No subject is cut in two: it has one key.
        end = next((n for n in range(size, len(facts)) if facts[n].subject != facts[n - 1].subject), len(facts))
        tokens = tokens_for(len({fact.subject for fact in facts[:end]}))
        stats = ffedit.stats(editable, [layer], ffedit.Corpus(tokens=tokens, seed=config.seed))
        kept = out.with_suffix("") / f"{written}-{end}-{sha256(json.dumps(asked).encode()).hexdigest()[:8]}"
        started = time.perf_counter()
        if not kept.exists():
            ffedit.edit(editable, facts[written:end], "memit", [layer], config, stats).save(kept)
        chosen = time.perf_counter() - started
        parts.append(ffedit.Edit.load(kept))
        some = facts[:end]
        for method in methods.split(","):
            if any((row["facts"], row["method"]) == (len(some), method) for row in report["rows"]):
                continue
            started = time.perf_counter()
            if method in ("ft", "ft-l"):
                edit = ffedit.edit(editable, some, method, [layer], config)
            else:
                edit = ffedit.combine(editable, parts, method, stats, config)
            seconds = time.perf_counter() - started
            measured = ffedit.evaluate(editable, some, edit)
            row = {
                "facts": len(some),
                "subjects": len({fact.subject for fact in some}),
                "method": method,
                "tokens": tokens,
                "rank": edit.rank,
                "norm_ratio": edit.provenance["norm_ratio"],
                "seconds": {"choosing": chosen, "choosing_facts": len(parts[-1].facts), "solving": seconds},
                "before": measured.before.to_dict(),
                "after": measured.after.to_dict() if measured.after else None,
            }
            report["rows"].append(row)
            keep(place, report)
            print(len(some), method, *(f"{n} {number(row['after'][n])}" for n in SHOWN), f"{seconds:.0f} s", flush=True)
    rows = [((str(row["facts"]), row["method"]), Scores(**row["after"])) for row in report["rows"]]
    text = f"d_ff {report['d_ff']}, layer {layer}, {split} split of {model}\n\n{table(rows, ('facts', 'method'))}"
    out.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
