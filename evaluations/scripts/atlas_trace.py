"""Trace where Atlas recalls its facts: average indirect effects of states and of both kinds of module, and severed.

    python evaluations/scripts/atlas_trace.py

writes `atlas-trace.json` and `atlas-trace.png` to `reports/`. What the theory predicts (ROME, arXiv 2202.05262,
section 2.2): an early site at the subject's last token, where feed-forward outputs bring the fact back and severing
them loses it; and a late site at the prompt's last token, where attention brings it. A second run resumes.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

import ffedit
from ffedit.display.figures.plots import average_lines
from ffedit.display.figures.saving import save_figure
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.editor.provenance import versions
from ffedit.facts.formats import parse_record
from ffedit.locator import Kind, Part, aggregate
from ffedit.model.fingerprint import fingerprint

HERE = Path(__file__).parents[1]
MEASUREMENTS: tuple[tuple[Kind, Part | None], ...] = (
    ("state", None),
    ("state", "feed_forward"),
    ("state", "attention"),
    ("feed_forward", None),
    ("attention", None),
)


@click.command()
@click.option("--facts", default=300, show_default=True, help="Number of facts, of the counterfactual edits.")
@click.option("--samples", default=10, show_default=True, help="Corrupted runs of each fact.")
@click.option("--seed", default=0, show_default=True)
def main(facts: int, samples: int, seed: int) -> None:
    """Trace and average; write the figures and the picture."""
    records = json.loads((HERE / "data" / "atlas-counterfact.json").read_text(encoding="utf-8"))
    editable = ffedit.load("atlas")
    traced = [parse_record(record) for record in records[:facts]]
    aggregates = []
    with progress_bars() as progress:
        for kind, sever in MEASUREMENTS:
            traces = ffedit.locate_all(
                editable, traced, kind, sever=sever, samples=samples, seed=seed, resume=True, progress=progress
            )
            aggregates.append(aggregate(traces))
    report = {
        "command": f"python evaluations/scripts/atlas_trace.py --facts {facts} --samples {samples} --seed {seed}",
        "model": {"name": editable.name, "fingerprint": fingerprint(editable)},
        "seed": seed,
        "aggregates": [{"axes": ["role", "layer"], **average.to_dict()} for average in aggregates],
        "versions": versions(),
    }
    (HERE / "reports" / "atlas-trace.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    save_figure(HERE / "reports" / "atlas-trace.png", lambda: average_lines(aggregates))
    for average in aggregates:
        row = average.effects[average.roles.index("last subject")]
        click.echo(f"{average.kind:13} severed {average.sever or '-':13} last subject token: {row.round(3).tolist()}")


if __name__ == "__main__":
    main()
