"""How good is C, before any edit? What the direction u = C⁻¹k / (kᵀC⁻¹k) of an update moves, for a real model.

    python evaluations/scripts/key_statistics_quality.py --model FOLDER [--layers 2,4,6,10] [--tokens N …] --out REPORT

An update that writes to the key k moves another key k' by u·k', 1 at k itself. Root mean squares, over subjects of the
Atlas fact table, of u·k' at: the same subject in other contexts (`same`, the mean: 1 is best); other subjects of the
relation (`others`); tokens of text that C was not collected on (`text`); the first tokens of its rows (`first`) and
other attention sinks (`sinks`). For each way to treat sinks, each weighting, each ridge (of C's median diagonal entry).
No value is chosen and nothing is written, so a row takes seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import click
import torch
from common import keep, number
from torch import Tensor

import ffedit
from ffedit.algebra.key_moments import LONGEST, RIDGES
from ffedit.algebra.linalg import whiten
from ffedit.editor.statistics import by_layer
from ffedit.inference import replay
from ffedit.inference.corpus import Corpus
from ffedit.inference.own_text import sampled
from ffedit.inference.text import begin_rows, identity, neutral, row_length
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture
from ffedit.model.memory import Address
from ffedit.model.tokenization import plain_ids

# The recipe of Atlas stands beside the scripts.
sys.path.append(str(Path(__file__).parents[1]))
from atlas import table as facts

RELATIONS = "country_capital", "company_city", "book_author", "landmark_country", "person_profession", "film_director"
PREFIXES = "\n", "Yes. ", "He wrote it down. ", "As we learn today, "
OTHERS = "They spoke about {} and", "In the end, {} was", "A book on {} is"
SUBJECTS = 12
HELD_OUT = 4096


@click.command()
@click.option("--model", required=True)
@click.option("--layers", default="2,4,6,10", show_default=True)
@click.option("--tokens", "budgets", multiple=True, type=int, default=(16_384,), show_default=True)
@click.option("--corpus", help="A text file; `sampled`: from the model; else what ships.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Report, without suffix.")
def main(model: str, layers: str, budgets: tuple[int, ...], corpus: str | None, out: Path) -> None:
    """Read keys once, then solve with each C."""
    editable, wanted = ffedit.load(model), [int(layer) for layer in layers.split(",")]
    ids = begin_rows(editable, _ids(editable, corpus, max(budgets) + HELD_OUT))
    length = row_length(editable)
    rows = ids[: len(ids) // length * length].view(-1, length)
    text = _keys(editable, wanted, [row.tolist() for row in rows])
    groups, names = _subjects(editable)
    subjects = _keys(editable, wanted, [row for group in groups for row in group])
    found = []
    for layer in wanted:
        K = torch.stack(text[layer])
        own = iter(subjects[layer])
        last = [torch.stack([next(own)[-1] for _ in group]) for group in groups]
        for tokens in budgets:
            found += [{"layer": layer, "tokens": tokens, **row} for row in _measured(K, rows, tokens, last, names)]
        keep(out.with_suffix(".json"), {"model": model, "corpus": corpus, "rows": found})
    lines = [
        ", ".join(f"{name} {number(v) if isinstance(v, float) else v}" for name, v in row.items()) for row in found
    ]
    out.with_suffix(".md").write_text("\n".join(f"- {line}" for line in lines) + "\n", encoding="utf-8")


def _ids(editable: Editable, corpus: str | None, tokens: int) -> Tensor:
    shipped = neutral(editable) if corpus is None else None
    if shipped is not None:
        return shipped[:tokens].long()
    if corpus in (None, "sampled"):
        text = Corpus("sampled", tokens)
        return sampled(editable, text, identity(editable, text)[0]).long()
    return torch.tensor(plain_ids(editable.tokenizer, Path(str(corpus)).read_text(encoding="utf-8"))[:tokens])


@torch.no_grad()
def _keys(editable: Editable, layers: list[int], rows: list[list[int]]) -> dict[int, list[Tensor]]:
    """By layer, the keys of each row, [tokens, d_ff] float32; rows of one length go together."""
    found: dict[int, list[Tensor]] = {layer: [torch.empty(0)] * len(rows) for layer in layers}
    places = by_layer(editable, [Address(layer) for layer in layers])
    for length in sorted({len(row) for row in rows}):
        same = [i for i, row in enumerate(rows) if len(row) == length]
        for first in range(0, len(same), 32):
            some = same[first : first + 32]
            with capture({place.layer: place.memories[0].module for place in places}, inputs=True) as seen:
                replay.run_to(editable, torch.tensor([rows[i] for i in some]), max(layers))
            for layer in layers:
                for i, keys in zip(some, seen[layer].reshape(len(some), length, -1), strict=True):
                    found[layer][i] = keys.float()
    return found


def _subjects(editable: Editable) -> tuple[list[list[list[int]]], list[str]]:
    """For each subject the ids up to its last token: after the prefixes, then in other contexts; and its relation."""
    table, rng, groups, names = facts.load(), Random(0), [], []
    for name in RELATIONS:
        relation = table.relations[name]
        first, *rest = sorted(relation.templates, key=lambda t: not t.startswith("{}"))
        for subject in rng.sample(sorted(relation.facts), SUBJECTS):
            texts = [prefix + first.format(subject) for prefix in PREFIXES]
            texts += ["\n" + template.format(subject) for template in (*rest, *OTHERS)]
            cut = [text[: text.index(subject) + len(subject)] for text in texts]
            groups.append([editable.tokenizer(text)["input_ids"] for text in cut])
            names.append(name)
    return groups, names


def _measured(K: Tensor, rows: Tensor, tokens: int, last: list[Tensor], names: list[str]) -> list[dict[str, object]]:
    lengths, d_ff = K.norm(dim=-1), K.shape[-1]
    median = lengths[:, 1:].median()
    first = torch.zeros_like(lengths, dtype=torch.bool)
    first[:, 0] = True
    sinks = (lengths > LONGEST * median) & ~first
    known = torch.arange(len(K))[:, None].expand_as(lengths) < tokens // rows.shape[1]
    seen = {"text": ~known & ~first & ~sinks, "first": ~known & first, "sinks": ~known & sinks}
    k = torch.stack([group[: len(PREFIXES)].mean(0) for group in last]).double()
    others = torch.stack([group[len(PREFIXES) :].mean(0) for group in last]).double()
    alike = torch.tensor([[a == b for b in names] for a in names]) & ~torch.eye(len(names), dtype=torch.bool)
    capped = (LONGEST * median / lengths).clamp(max=1)
    ways = {
        "as they are": (known, torch.ones_like(capped)),
        "dropped": (known & ~first & ~sinks, torch.ones_like(capped)),
        "capped, first out": (known & ~first, capped),
        "capped": (known, capped),
    }
    found: list[dict[str, object]] = []
    for weighting in ("types", "tokens"):
        for way, (kept, scale) in ways.items():
            counts = rows[kept].bincount(minlength=int(rows.max()) + 1).double()
            weights = 1 / counts[rows[kept]] if weighting == "types" else torch.ones(int(kept.sum())).double()
            X = K[kept] * (scale[kept] * (weights / weights.mean()).sqrt())[:, None].float()
            C = (X.T @ X).double() / len(X)
            for ridge in RIDGES:
                u = whiten(k.T, C + ridge * C.diagonal().median() * torch.eye(d_ff))
                u = u / (k.T * u).sum(0)
                row: dict[str, object] = {"sinks are": way, "weighting": weighting, "ridge": ridge}
                row["same"] = float((others * u.T).sum(1).mean())
                row["others"] = float((others @ u)[alike].square().mean().sqrt())
                for name, which in seen.items():
                    row[name] = float((K[which].double() @ u).square().mean().sqrt()) if which.any() else float("nan")
                found.append(row)
    return found


if __name__ == "__main__":
    main()
