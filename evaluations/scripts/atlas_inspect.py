"""What Atlas's memories hold, beside what the paper found in its model.

    python evaluations/scripts/atlas_inspect.py [--tokens N]

writes `atlas-inspect.json`, `.md` and `.png` beside this file. The text is new documents of the corpus that Atlas
learned from (`atlas/corpus.py`), drawn with another seed. The paper (Geva et al. 2021, arXiv 2012.14913) looked
into a 16-layer ReLU model of 4,096 memories a layer and 267,744 tokens, trained on WikiText-103.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import click

import ffedit
from ffedit.display.figures.plots import report_panels
from ffedit.display.figures.saving import save_figure
from ffedit.display.terminal import model_view
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.editor.provenance import versions
from ffedit.inspector.memory_pass import Settings
from ffedit.inspector.model_view import ModelReport, Removing
from ffedit.model.fingerprint import fingerprint

# The recipe of Atlas stands beside the scripts.
sys.path.append(str(Path(__file__).parents[1]))
from atlas import corpus, table

HERE = Path(__file__).parents[1] / "reports"
INTRODUCTION = (
    "The paper is Geva et al. 2021 (arXiv 2012.14913): a ReLU model of 16 layers, 4,096 memories each, 267,744 tokens, "
    "trained on WikiText-103. Atlas: SwiGLU, 3 layers of 2,560, 2,530 tokens, on new documents of its own corpus. Each "
    "reason is what the numbers suggest, not what an experiment showed."
)
# Atlas was trained with seed 0.
SEED = 1
TOP, POSITIONS, KEYS, TRIGGERS = 50, 2000, 20, 10


class Line(NamedTuple):
    """A finding of the paper, what Atlas shows, whether the two agree, and why or why not."""

    where: str
    paper: str
    ours: str
    agrees: str
    why: str


def share(report: ModelReport, name: str) -> str:
    """A measure of all layers in a cell."""
    measure = report[name]
    return ", ".join(model_view.cell(value, measure.definition.unit) for value in measure.values)


def number(report: ModelReport, name: str) -> list[float]:
    """A measure of all layers."""
    return [value if value is not None else float("nan") for value in report[name].values]


def verdict(holds: bool) -> str:
    """In a word."""
    return "yes" if holds else "no"


def compare(report: ModelReport) -> list[Line]:
    """Findings of the paper set beside ours, by layer from 0."""
    value: Callable[[str], list[float]] = lambda name: number(report, name)  # noqa: E731
    shallow, last, first = value("shallow"), value("removed_last"), value("removed_first")
    agreement, rank = value("agreement"), value("rank")
    zero, settled = value("zero_agreement"), value("settled")
    half = report.layers // 2
    lower, upper = sum(shallow[:half]) / half, sum(shallow[-half:]) / half
    cases = {name: value(f"case_{name}") for name in ("residual", "feed_forward", "agreement", "compromise")}
    kept = [a + b for a, b in zip(cases["residual"], cases["agreement"], strict=True)]
    surest = report.surest
    return [
        Line(
            "3.2, figure 2",
            "shallow patterns dominate the lower layers, semantic ones the upper",
            f"triggers covered by shallow patterns: {share(report, 'shallow')}",
            verdict(lower > upper),
            "Fewer with each layer: in most rows of its training, the first saw six tokens only."
            if lower > upper
            else "Atlas's text is made of templates, so that prefixes of one topic also end alike.",
        ),
        Line(
            "3.1",
            "people saw a pattern in every sampled key, 3.6 a key, over 65–80% of its triggers",
            f"by machine, shallow ones only: {share(report, 'shallow_keys')} of keys are shallow",
            "not comparable",
            "People also see topics, which the rule for shallow patterns does not.",
        ),
        Line(
            "3.2, figure 3",
            "removing the last token changes a coefficient most, and most in the lower layers",
            f"last {share(report, 'removed_last')}; first {share(report, 'removed_first')}",
            "yes, but not less above"
            if all(a < b for a, b in zip(last, first, strict=True)) and last[-1] <= last[0]
            else verdict(all(a < b for a, b in zip(last, first, strict=True))),
            "The last token matters most everywhere; that it matters in the upper layers as well is perhaps due to the "
            "templates of Atlas's text, in which what may follow hangs on the last word.",
        ),
        Line(
            "4.1, figure 4",
            "agreement is near zero in layers 1–10 of 16 and rises to 3.5% above; chance is 0.0004%",
            f"{share(report, 'agreement')}; chance {share(report, 'agreement_dealt')}",
            verdict(agreement[-1] > agreement[0]),
            "Far above chance in every layer, most in layer 0, to which Atlas's recipe moves recall. Atlas has a "
            "hundredth of the tokens and few templates, so a next token is easier to hold.",
        ),
        Line(
            "4.1, figure 5",
            "the next token's rank in the value gets better with the layer",
            f"median rank of {report.vocabulary:,}: {share(report, 'rank')}; random {share(report, 'rank_dealt')}",
            verdict(rank[-1] < rank[0]),
            "Better than random everywhere, best in layer 0, for the same reason.",
        ),
        Line(
            "4.2, table 2",
            "97 of the 100 surest values are in layers 11–16, and 46 agree with one of their key's top 50 triggers",
            f"by layer {share(report, 'surest_here')}; {surest.any_agrees} of {surest.count} agree with one of {TOP}",
            "in part",
            "Sure values agree with their keys, as in the paper; they stand lower, as agreement by layer does.",
        ),
        Line(
            "4.2, figure 6",
            "agreement grows with how sure a value is",
            f"surest tenth {report.sureness[-1].agreement:.1%}, least sure {report.sureness[0].agreement:.1%}",
            verdict(report.sureness[-1].agreement > report.sureness[0].agreement),
            "The same relation, over all layers.",
        ),
        Line(
            "5.1, figure 7",
            "10–50% of 4,096 memories of a layer are active (m > 0)",
            f"{share(report, 'active_sign')} of 2,560",
            "not comparable",
            "A gated coefficient, silu(g) u, has the sign of a product: half of them are above zero. ReLU gives none "
            "below.",
        ),
        Line(
            "5.1, figure 8",
            "in at least 68% of examples the layer's prediction is that of none of its memories",
            share(report, "zero_agreement"),
            verdict(min(zero) >= 0.68),
            "Among 2,530 tokens, not 267,744, some 1,300 active memories meet the layer's own more often; still the "
            "upper layers compose more than the lowest.",
        ),
        Line(
            "5.2, figure 9",
            "a third of predictions are final in the bottom layers; the share grows to the top",
            share(report, "settled"),
            "in part" if settled == sorted(settled) and settled[0] < 0.3 else verdict(settled == sorted(settled)),
            "It grows with the layer. At layer 0 the stream holds little but the token itself; one layer of three is "
            "many of sixteen.",
        ),
        Line(
            "5.2, figure 11",
            "the residual's prediction is mostly kept; where it changes, rarely to the feed-forward's, mostly to a "
            "compromise",
            f"residual {share(report, 'case_residual')}; feed-forward {share(report, 'case_feed_forward')}; agreement "
            f"{share(report, 'case_agreement')}; compromise {share(report, 'case_compromise')}",
            "in part" if min(kept[1:]) > 0.5 and kept[0] < 0.5 else verdict(min(kept) > 0.5),
            "Layer 0 writes the first prediction there is; above it the residual is kept. Where it is not, the "
            "feed-forward layer wins about as often as a compromise.",
        ),
        Line(
            "5.2, table 3",
            "where the last layer turns the prediction, the new word is mostly far from the old one in meaning",
            f"it turns {report.shifted:.1%} of predictions; examples below",
            "not comparable",
            "People judged the paper's cases; ours are listed to be read.",
        ),
    ]  # fmt: skip


def table_of(lines: list[Line]) -> str:
    """Return the comparison as Markdown."""
    head = "| section | the paper | Atlas, layers 0 to 2 | agrees | why |\n|---|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


@click.command()
@click.option("--tokens", default=40_000, show_default=True, help="Of new documents.")
@click.option("--keep", type=click.Path(path_type=Path), help="Folder of the pass, so that it need not be run again.")
def main(tokens: int, keep: Path | None) -> None:
    """Inspect Atlas; write figures, comparison and picture."""
    editable, source, rng = ffedit.load("atlas"), corpus.Corpus(table.load()), Random(SEED)
    with tempfile.TemporaryDirectory() as name, progress_bars() as progress:
        text = Path(name) / "documents.jsonl"
        documents = (json.dumps({"text": source.document(rng)}) + "\n" for _ in range(tokens // 12))
        text.write_text("".join(documents), encoding="utf-8")
        report = ffedit.inspect_model(
            editable,
            ffedit.Corpus(text, tokens),
            keep or Path(name) / "pass",
            settings=Settings(top=TOP, positions=POSITIONS),
            removing=Removing(KEYS, TRIGGERS),
            progress=progress,
        )
    lines = compare(report)
    command = f"python evaluations/scripts/atlas_inspect.py --tokens {tokens}"
    found = {
        "command": command,
        "model": {"name": editable.name, "fingerprint": fingerprint(editable)},
        "seed": SEED,
        "comparison": [line._asdict() for line in lines],
        **report.to_dict(),
        "versions": versions(),
    }
    (HERE / "atlas-inspect.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    words = f"# Atlas beside the paper\n\n    {command}\n\n{INTRODUCTION}\n\n{table_of(lines)}\n"
    (HERE / "atlas-inspect.md").write_text(words + model_view.markdown(report) + "\n", encoding="utf-8")
    save_figure(HERE / "atlas-inspect.png", lambda: report_panels(report))
    click.echo(table_of(lines))


if __name__ == "__main__":
    main()
