"""Facts written one upon the other, and the same edits solved jointly afterwards (`ffedit.combine`).

    python evaluations/scripts/joined.py --model smollm2 --data FACTS.json --split development --limit 100 --layer 8

Each edit preserves those before it, as `ffedit apply` on an edited model does. All facts are scored with the whole
sequence in the model, and with the one edit that joins the same keys and values. A table in Markdown is printed.
"""

from pathlib import Path

import click
from one_by_one import FOUR, columns_of, facts_in, interval, named, rates, shown

import ffedit
from ffedit import Edit
from ffedit.evaluator import GenericText


@click.command(help=__doc__)
@click.option("--model", required=True)
@click.option("--dtype", default="auto", show_default=True, help="What the model is computed in.")
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Facts.")
@click.option("--split", help="Of a file with splits.")
@click.option("--limit", type=int, help="Only the first facts.")
@click.option("--layer", type=int, help="Where to write; default: where ffedit does.")
def main(model: str, dtype: str, data: Path, split: str | None, limit: int | None, layer: int | None) -> None:
    """Edit, join, and print the scores of both."""
    editable, facts = ffedit.load(model, dtype=dtype), facts_in(data, split, limit)
    evaluation, text = ffedit.evaluator.Evaluation(editable, facts), GenericText(editable)

    def row(name: str) -> str:
        lines = [
            {**named(fact), "after": rates(now.scores), "seconds": 0.0, "processor_seconds": 0.0}
            for fact, now in zip(facts, evaluation.scores(), strict=True)
        ]
        columns = columns_of(lines, [line["fact"] for line in lines])
        scores = [shown(interval(columns, score)) for score in (*FOUR, "harmonic")]
        return f"| {name} | {len(facts)} | {' | '.join(scores)} | {text.measure()[0]:.3f} |"

    click.echo(f"| | facts | {' | '.join((*FOUR, 'harmonic'))} | drift |\n|{'---|' * 8}")
    edits: list[Edit] = []
    for fact in facts:
        edits.append(ffedit.edit(editable, fact, layers=layer, preserve=edits))
        edits[-1].apply_(editable)
        click.echo(f"{len(edits)}/{len(facts)}", err=True)
    click.echo(row("one upon the other"))
    for edit in reversed(edits):
        edit.undo_(editable)
    joint = ffedit.combine(editable, edits)
    with joint.applied(editable):
        click.echo(row("the same, solved jointly"))


if __name__ == "__main__":
    main()
