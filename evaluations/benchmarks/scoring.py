"""Time the scoring of facts against the plain loop of `reference_scores`, in one run.

    python evaluations/benchmarks/scoring.py [--out FILE.json] [--threads N] [--records N] [--gpt2 N] [--parts N]

Two settings, float32: records of `evaluations/data/atlas-counterfact.json` on Atlas; and on GPT-2 124M in shape, with
random weights, records with as many prompts (one, 2 paraphrases, 10 neighbors, 2 of the same subject) of 8 to 14
tokens, and objects of one or two tokens. Every prompt of every kind is scored before and after a change of one value
matrix: both objects' likelihoods, teacher-forced tokens, free generation, divergence on neighbors. The seconds of
both sides include preparing the questions. Both sides take turns on the same records, a part of them at a time,
after a warm-up; the side that begins changes from part to part.

    ratio      seconds of the plain loop / of ffedit, over all records; and part by part: median, smallest, largest
    equal      largest difference of a score of a fact, before or after
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import click
import measuring
import torch
from reference_scores import PlainScores
from transformers import GPT2Config

import ffedit
from ffedit.evaluator import Evaluation

RECORDS = Path(__file__).parents[1] / "data" / "atlas-counterfact.json"
TOLERANCE = 1e-5
WORDS, SEED = 1000, 0
PARTS = 5


@contextmanager
def changed(editable: ffedit.Editable) -> Iterator[None]:
    """In the block, the value matrix of a middle layer is changed at random, by a tenth of its norm."""
    value = editable.memories[len(editable.layers) // 2].value
    kept = value.clone()
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(SEED))
    value.add_(noise.to(value) * (0.1 * kept.norm() / noise.norm()))
    try:
        yield
    finally:
        value.copy_(kept)


def ours(editable: ffedit.Editable, facts: Sequence[ffedit.Fact]) -> list[list[dict[str, Any]]]:
    """Return the scores before and after the change, fact by fact."""
    evaluation = Evaluation(editable, facts)
    with changed(editable):
        after = evaluation.scores()
    return [[fact.scores.to_dict() for fact in side] for side in (evaluation.before, after)]


def theirs(editable: ffedit.Editable, facts: Sequence[ffedit.Fact]) -> list[list[dict[str, Any]]]:
    """Return the same by the plain loop."""
    plain = PlainScores(editable.model, editable.tokenizer, facts)
    before = plain.all()
    with changed(editable):
        return [before, plain.all()]


def made(count: int) -> list[ffedit.Fact]:
    """Return records in CounterFact's form, of words that `measuring.random_gpt2` knows."""
    draw = Random(SEED)

    def words(least: int, most: int) -> str:
        return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randint(least, most)))

    facts = []
    for _ in range(count):
        subject, new = words(2, 3), f"w{draw.randrange(WORDS // 2)}"
        facts.append(
            ffedit.Fact(
                subject,
                f"{words(2, 4)} {{}} {words(4, 7)}",
                draw.choice([new, f"{new} {words(1, 1)}"]),
                f"w{draw.randrange(WORDS // 2, WORDS)}",
                [f"{words(4, 5)} {{}} {words(2, 6)}" for _ in range(2)],
                [words(8, 14) for _ in range(10)],
                [{"prompt": f"{{}} {words(6, 11)}", "target": words(1, 2)} for _ in range(2)],
            )
        )
    return facts


def difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Return the largest difference of a score of the plain loop; infinite if one side lacks a score."""
    most = 0.0
    for mine, plain in zip((f for side in ours for f in side), (f for side in theirs for f in side), strict=True):
        for name, value in plain.items():
            if (value is None) != (mine[name] is None):
                return float("inf")
            most = max(most, abs(value - mine[name]) if value is not None else 0.0)
    return most


def compare(name: str, editable: ffedit.Editable, facts: Sequence[ffedit.Fact], parts: int) -> dict[str, Any]:
    """Time both sides on the same records, part by part."""
    shares = [facts[i::parts] for i in range(parts)]
    sides = {"reference": lambda n: theirs(editable, shares[n]), "ffedit": lambda n: ours(editable, shares[n])}
    theirs(editable, facts[:1])
    ours(editable, facts[:2])
    seconds, results = measuring.rounds(sides, parts)
    largest = max(difference(a, b) for a, b in zip(results["ffedit"], results["reference"], strict=True))
    totals = {side: sum(passed) for side, passed in seconds.items()}
    return {
        "name": name,
        "records": len(facts),
        "prompts": sum(1 + len(f.paraphrases) + len(f.neighbors) + len(f.same_subject) for f in facts),
        "seconds": totals,
        "ratio": totals["reference"] / totals["ffedit"],
        "by_part": measuring.spread(b / a for a, b in zip(seconds["ffedit"], seconds["reference"], strict=True)),
        "difference": largest,
        "equal": largest <= TOLERANCE,
    }


def show(row: dict[str, Any]) -> None:
    """Print the lines of one setting."""
    print(f"{row['name']}: {row['records']} records, {row['prompts']} prompts, before and after")
    print(f"    seconds   ffedit {row['seconds']['ffedit']:.1f}, reference {row['seconds']['reference']:.1f}")
    print(f"    ratio     {row['ratio']:.1f}; by part {measuring.shown(row['by_part'], 1)}")
    print(f"    equal     {'yes' if row['equal'] else 'NO'}: a score differs by {row['difference']:.1e}", flush=True)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON.")
@click.option("--threads", type=click.IntRange(min=1), default=torch.get_num_threads, help="Default: torch's own.")
@click.option("--records", type=click.IntRange(min=0), default=500, show_default=True, help="On Atlas.")
@click.option("--gpt2", type=click.IntRange(min=0), default=50, show_default=True, help="On GPT-2 124M in shape.")
@click.option("--parts", type=click.IntRange(min=1), default=PARTS, show_default=True, help="On Atlas; else 2.")
def main(out: Path | None, threads: int, records: int, gpt2: int, parts: int) -> None:
    """Time the scoring of facts against the plain loop; exits with 1 where the scores are not equal."""
    load = measuring.load_before(threads)
    torch.set_num_threads(threads)
    rows = []
    if records:
        atlas = ffedit.load("atlas")
        rows.append(compare("Atlas", atlas, ffedit.read_facts(RECORDS)[:records], min(parts, records)))
        show(rows[-1])
    if gpt2:
        random = measuring.random_gpt2(GPT2Config(), WORDS, SEED)
        rows.append(compare("GPT-2 124M, random weights", random, made(gpt2), min(parts, gpt2, 2)))
        show(rows[-1])
    report = {"settings": rows, "tolerance": TOLERANCE, "seed": SEED, **measuring.machine(threads, load)}
    measuring.finish(out, report, all(row["equal"] for row in rows))


if __name__ == "__main__":
    main()
