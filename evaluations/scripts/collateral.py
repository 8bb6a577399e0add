"""Measure side effects of edits: two tasks about neither the facts nor their subjects, and a text.

    python evaluations/scripts/collateral.py EDIT... [--model smollm2] [--text FILE] [--out FILE.json]

EDITs are folders of `ffedit apply --out`, or those that `ffedit bench` keeps in RUN/edits/METHOD/. They are applied one
on top of another; after each one, this is measured:

    agreement    share of sentences whose verb agrees with its subject in number across other nouns ("The author that
                 the guards admire laughs", not "laugh"): the right form has the larger probability; 320 items
    sequences    share of well-known sequences (days, months, numbers, letters, seasons, planets) whose next item is the
                 likeliest of all of its sequence; 75 items
    perplexity   of a text, by default one that the unedited model samples
    drift        KL divergence of the next-token distribution from the unedited model's, nats per token

All items are made here, by templates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import click
from common import keep

import ffedit
from ffedit.evaluator import GenericText
from ffedit.evaluator.responses import ask

# Singular and plural of a subject, of a noun beside it, and of their verbs.
SUBJECTS = (("author", "authors"), ("pilot", "pilots"), ("farmer", "farmers"), ("doctor", "doctors"))
BESIDE = (("guard", "guards"), ("teacher", "teachers"))
CLAUSES = (
    "The {} that the {} admire{s}",
    "The {} near the {}",
    "The {} behind the {}",
    "The {} who met the {} yesterday",
)
VERBS = (("is", "are"), ("has", "have"), ("laughs", "laugh"), ("writes", "write"), ("was", "were"))
SEQUENCES = {
    "days": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "months": "January February March April May June July August September October November December",
    "words": "one two three four five six seven eight nine ten eleven twelve",
    "numbers": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
    "letters": "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    "ordinals": "first second third fourth fifth sixth seventh eighth ninth tenth",
    "seasons": "spring summer autumn winter",
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
}
SHOWN_BEFORE = 3

# A prompt, the right answer, and wrong ones.
Item = tuple[str, str, tuple[str, ...]]


def agreement() -> Iterator[Item]:
    """Yield sentences up to their verb, with a noun of the other number between it and its subject."""
    for clause, subject, beside, verb, plural in product(CLAUSES, SUBJECTS, BESIDE, VERBS, (0, 1)):
        prompt = clause.format(subject[plural], beside[1 - plural], s="s" if plural else "")
        yield prompt, verb[plural], (verb[1 - plural],)


def sequences() -> Iterator[Item]:
    """Yield three neighbouring items of a sequence, and the one that follows."""
    for line in SEQUENCES.values():
        items = line.split()
        for start in range(len(items) - SHOWN_BEFORE):
            end = start + SHOWN_BEFORE
            yield ", ".join(items[start:end]) + ",", items[end], tuple(items[:end] + items[end + 1 :])


TASKS = {"agreement": tuple(agreement()), "sequences": tuple(sequences())}


def accuracy(editable: ffedit.Editable, items: Sequence[Item]) -> float:
    """Return the share of items whose right answer has a larger probability than every wrong one; a tie is wrong."""
    encoded = [editable.encode(prompt, answer) for prompt, right, wrong in items for answer in (right, *wrong)]
    answers = ask(editable, encoded)
    scores = iter([sum(answers[text].log_probs) for text in encoded])
    correct = 0
    for _, _, wrong in items:
        right, *others = [next(scores) for _ in range(1 + len(wrong))]
        correct += all(right > other for other in others)
    return correct / len(items)


class Collateral:
    """Measures the tasks and the text on a model; `text` keeps the unedited model's predictions."""

    def __init__(self, editable: ffedit.Editable, text: Path | None = None) -> None:
        self.editable, self.text = editable, GenericText(editable, text)

    def measure(self) -> dict[str, float]:
        """Return all figures of the model with its present weights."""
        tasks = {name: accuracy(self.editable, items) for name, items in TASKS.items()}
        drift, perplexity = self.text.measure()
        return {**tasks, "perplexity": perplexity, "drift": drift}


@click.command(help=__doc__)
@click.argument("edits", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", default="smollm2", show_default=True)
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A text file.")
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON.")
def main(edits: Sequence[Path], model: str, text: Path | None, out: Path | None) -> None:
    """Measure before all edits and after each."""
    editable = ffedit.load(model)
    collateral, facts = Collateral(editable, text), 0
    rows = [{"facts": 0, **collateral.measure()}]
    for path in (None, *edits):
        if path is not None:
            edit = ffedit.Edit.load(path)
            for at, delta in edit.updates.items():
                editable.memories[at].write_(delta)
            facts += len(edit.facts)
            rows.append({"facts": facts, **collateral.measure()})
        print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    if out is not None:
        keep(out, {"model": model, "items": {name: len(items) for name, items in TASKS.items()}, "rows": rows})


if __name__ == "__main__":
    main()
