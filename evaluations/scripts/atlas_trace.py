"""Where Atlas recalls its facts: average indirect effects of states, feed-forward and attention outputs, and severed.

    python evaluations/scripts/atlas_trace.py

writes `atlas-trace.json` and `atlas-trace.png` to `reports/`. What the theory predicts (ROME, arXiv 2202.05262,
section 2.2): an early site at the subject's last token, where feed-forward outputs bring the fact back and severing
them loses it; and a late site at the prompt's last token, where attention brings it. An interrupted run goes on.
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
@click.option("--facts", default=300, show_default=True, help="How many of the counterfactual edits' facts.")
@click.option("--samples", default=10, show_default=True, help="Corrupted runs of each fact.")
@click.option("--seed", default=0, show_default=True)
def main(facts: int, samples: int, seed: int) -> None:
    """Trace and average; write figures and picture."""
    records = json.loads((HERE / "data" / "atlas-counterfact.json").read_text(encoding="utf-8"))
    editable = ffedit.load("atlas")
    some = [parse_record(record) for record in records[:facts]]
    aggregates = []
    with progress_bars() as progress:
        for kind, sever in MEASUREMENTS:
            traces = ffedit.locate_all(
                editable, some, kind, sever=sever, samples=samples, seed=seed, resume=True, progress=progress
            )
            aggregates.append(aggregate(traces))
    report = {
        "command": f"python evaluations/scripts/atlas_trace.py --facts {facts} --samples {samples} --seed {seed}",
        "model": {"name": editable.name, "fingerprint": fingerprint(editable)},
        "seed": seed,
        "aggregates": [{"axes": ["role", "layer"], **one.to_dict()} for one in aggregates],
        "versions": versions(),
    }
    (HERE / "reports" / "atlas-trace.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    save_figure(HERE / "reports" / "atlas-trace.png", lambda: average_lines(aggregates))
    for one in aggregates:
        row = one.effects[one.roles.index("last subject")]
        click.echo(f"{one.kind:13} severed {one.sever or '-':13} last subject token: {row.round(3).tolist()}")


if __name__ == "__main__":
    main()
