"""Compare the memories of Atlas with those of the model in Geva et al. 2021 (arXiv 2012.14913).

    python evaluations/scripts/atlas_inspect.py [--tokens N]

writes `reports/atlas-inspect.json` and `.md`. The text is new documents of the corpus that Atlas learned from
(`atlas/corpus.py`), drawn with another seed. The paper looked into a 16-layer ReLU model of 4,096 memories a layer and
267,744 tokens, trained on WikiText-103.

One pass over the text, in memory, keeps the triggers of every key (the `TOP` different prefixes of largest positive
coefficient) and the streams at `POSITIONS` positions drawn at random. `v_i` is read through the model's own final norm
and its unembedding, where the paper has the unembedding only. With r the residual stream without the feed-forward
output o of a layer and y = r + o, top(x) the most probable token of x:

- *agreement*: top(v_i) is the token that follows the top trigger of key i; *by chance*: the one that follows another
  key's, the keys of a layer permuted;
- *zero agreement*: top(o) is top(v_i) of no memory with m_i > 0;
- *already final*: top(r) is the model's prediction;
- four cases: *residual*, top(y) = top(r) ≠ top(o); *feed-forward*, top(y) = top(o) ≠ top(r); *agreement*, all three are
  the same; *compromise*, top(y) is neither.

Shallow patterns and the removal of tokens are explained in `key_analyses.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click
import torch
from key_analyses import Frequencies, Shallow, removal
from torch import Tensor

import ffedit
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.editor.provenance import versions
from ffedit.inspector.rows import Positions
from ffedit.inspector.views import log_prob_batches
from ffedit.model.editable import Editable, Seen
from ffedit.model.fingerprint import fingerprint
from ffedit.model.tokenization import decode

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
TOP, POSITIONS, KEYS, TRIGGERS, SUREST, SHIFTS = 50, 2000, 100, 10, 100, 10
TOKENS_PER_BATCH = 2048
NOTHING = -1  # no position
CASES = ("residual", "feed-forward", "agreement", "compromise")


class Layer(NamedTuple):
    """One layer after the pass over the text."""

    coefficients: Tensor  # those of each key's triggers, the largest first, 0 beyond the last trigger, [d_ff, TOP]
    ends: Tensor  # positions of the triggers' last tokens, `NOTHING` beyond the last trigger, [d_ff, TOP]
    before: Tensor  # r at the sampled positions, [n, d_model]
    added: Tensor  # o, [n, d_model]
    after: Tensor  # y, [n, d_model]
    positive: Tensor  # m > 0, [n, d_ff]


def read_text(
    editable: Editable, positions: Positions, sample: Tensor, progress: ffedit.progress.Progress
) -> list[Layer]:
    """Run the text once and keep every key's triggers, and the streams at `sample`, ascending [n]."""
    total, done, prefixes = len(positions), 0, set()
    is_new = torch.zeros(total, dtype=torch.bool)  # the first occurrence of its prefix
    for position in range(total):
        if (prefix := positions.prefix(position)) not in prefixes:
            prefixes.add(prefix)
            is_new[position] = True
    widths = [feed_forward.d_ff for feed_forward in editable.feed_forward]
    best = [(torch.zeros(d_ff, TOP), torch.full((d_ff, TOP), NOTHING)) for d_ff in widths]
    streams: list[list[tuple[Tensor, ...]]] = [[] for _ in widths]
    for ids, inside in positions.batches(TOKENS_PER_BATCH):
        here = torch.arange(done, done + int(inside.sum()))
        new, chosen = is_new[here], torch.isin(here, sample)

        def see(
            seen: Seen, inside: Tensor = inside, here: Tensor = here, new: Tensor = new, chosen: Tensor = chosen
        ) -> None:
            m = seen.key[inside]
            kept, ends = best[seen.layer]
            largest = torch.cat([kept, m[new].T], 1).topk(TOP, 1)
            all_ends = torch.cat([ends, here[new].expand(len(ends), -1)], 1)
            best[seen.layer] = largest.values, all_ends.gather(1, largest.indices)
            states = (stream[inside][chosen].clone() for stream in (seen.before, seen.added, seen.total))
            streams[seen.layer].append((*states, m[chosen] > 0))

        editable.stream(ids, see)
        progress("reading text", done := done + len(here), total)
    return [
        Layer(*kept, *map(torch.cat, zip(*pieces, strict=True))) for kept, pieces in zip(best, streams, strict=True)
    ]


def read_vectors(editable: Editable, vectors: Tensor, *tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the top token of each vector [n, d_model], its probability, and the ranks of each of `tokens` [k, n]."""
    tops, probabilities, ranks, done = [], [], [], 0
    for log_p in log_prob_batches(editable, vectors):
        best = log_p.max(-1)
        tops.append(best.indices)
        probabilities.append(best.values.exp())
        asked = [token[done : done + len(log_p)].clamp(min=0)[:, None] for token in tokens]
        ranks.append(torch.stack([(log_p > log_p.gather(1, token)).sum(1) + 1 for token in asked] or [best.indices]))
        done += len(log_p)
    return torch.cat(tops), torch.cat(probabilities), torch.cat(ranks, 1)


def measure(editable: Editable, positions: Positions, progress: ffedit.progress.Progress) -> dict[str, Any]:
    """Return every measure by layer, and those over all layers."""
    generator = torch.Generator().manual_seed(SEED)
    sample = torch.randperm(len(positions), generator=generator)[:POSITIONS].sort().values
    layers = read_text(editable, positions, sample, progress)
    following = torch.tensor([positions.next(position) for position in range(len(positions))])
    text = Frequencies.of(row[:-1] for row in positions.rows)
    prediction, _, _ = read_vectors(editable, layers[-1].after)
    by_layer: dict[str, list[float]] = {}
    sure, top, agrees, any_agrees, at = [], [], [], [], []
    for number, (layer, feed_forward) in enumerate(zip(layers, editable.feed_forward, strict=True)):
        count = (layer.ends != NOTHING).sum(1)
        fires = count.nonzero()[:, 0]
        prefixes = {
            key: [positions.prefix(i) for i in layer.ends[key, : count[key]].tolist()] for key in fires.tolist()
        }
        patterns = (Shallow.of(triggers, text) for triggers in prefixes.values())
        shallow = [pattern for pattern in patterns if pattern is not None]
        drawn = fires[torch.randperm(len(fires), generator=generator)[:KEYS]].tolist()
        removals = (removal(editable, feed_forward, key, prefixes[key][:TRIGGERS]) for key in drawn)
        removed = [effect for effect in removals if effect is not None]
        follows = torch.full_like(count, NOTHING)
        follows[fires] = following[layer.ends[fires, 0]]
        dealt = follows.clone()
        dealt[fires] = follows[fires[torch.randperm(len(fires), generator=generator)]]
        says, probability, ranks = read_vectors(editable, feed_forward.value.T, follows, dealt)
        agreeing = following[layer.ends[fires].clamp(min=0)] == says[fires, None]
        sure.append(probability[fires])
        top.append(says[fires])
        agrees.append(agreeing[:, 0])
        any_agrees.append((agreeing & (layer.ends[fires] != NOTHING)).any(1))
        at.append(torch.full_like(fires, number))
        r, o, y = (read_vectors(editable, stream)[0] for stream in (layer.before, layer.added, layer.after))
        cases = ((y == r) & (y != o), (y == o) & (y != r), (y == r) & (y == o), (y != r) & (y != o))
        zero = [not bool((says[active] == token).any()) for active, token in zip(layer.positive, o, strict=True)]
        for name, value in {
            "shallow": mean([pattern.covered for pattern in shallow]),
            "shallow_keys": mean([pattern.is_shallow for pattern in shallow]),
            **{f"removed_{name}": mean([getattr(e, name) for e in removed]) for name in ("first", "random", "last")},
            "agreement": mean(agrees[-1]),
            "agreement_dealt": mean((says == dealt)[fires]),
            "rank": float(ranks[0, fires].median()),
            "rank_dealt": float(ranks[1, fires].median()),
            "active_sign": mean(layer.positive),
            "zero_agreement": mean(zero),
            "settled": mean(r == prediction),
            **{f"case_{name}": mean(case) for name, case in zip(CASES, cases, strict=True)},
        }.items():
            by_layer.setdefault(name, []).append(value)
        progress("measuring layers", number + 1, len(layers))
    order = torch.cat(sure).sort(descending=True, stable=True).indices
    surest, tenth = order[:SUREST], len(order) // 10
    turned = (y != r).nonzero()[:, 0]
    return {
        "by_layer": by_layer,
        "surest": {
            "by_layer": [mean(torch.cat(at)[surest] == number) for number in range(len(layers))],
            "agree_with_a_trigger": int(torch.cat(any_agrees)[surest].sum()),
            "agreement_of_surest_tenth": mean(torch.cat(agrees)[order[:tenth]]),
            "agreement_of_least_sure_tenth": mean(torch.cat(agrees)[order[-tenth:]]),
        },
        "shifted": mean(y != r),
        "shifts": [
            {
                "prefix": decode(editable.tokenizer, positions.prefix(int(sample[i]))),
                **{name: decode(editable.tokenizer, [int(ids[i])]) for name, ids in zip("roy", (r, o, y), strict=True)},
            }
            for i in turned[torch.randperm(len(turned), generator=generator)[:SHIFTS]].tolist()
        ],
    }


def mean(values: Tensor | Sequence[float]) -> float:
    """Return the mean of numbers, or the share of entries that are true."""
    return float(torch.as_tensor(values, dtype=torch.float64).mean())


class Line(NamedTuple):
    """A finding of the paper, what Atlas shows, whether the two agree, and why or why not."""

    where: str
    paper: str
    ours: str
    agrees: str
    why: str


def share(values: Sequence[float]) -> str:
    """Format a measure of all layers as shares."""
    return ", ".join(f"{value:.1%}" for value in values)


def whole(values: Sequence[float]) -> str:
    """Format a measure of all layers as whole numbers."""
    return ", ".join(f"{value:,.0f}" for value in values)


def verdict(holds: bool) -> str:
    """Return "yes" or "no"."""
    return "yes" if holds else "no"


def compare(measures: dict[str, Any], vocabulary: int) -> list[Line]:
    """Return the paper's findings beside those on Atlas, by layer from 0."""
    value: dict[str, list[float]] = measures["by_layer"]
    shallow, last, first = value["shallow"], value["removed_last"], value["removed_first"]
    agreement, rank = value["agreement"], value["rank"]
    zero, settled = value["zero_agreement"], value["settled"]
    half = len(shallow) // 2
    lower, upper = sum(shallow[:half]) / half, sum(shallow[-half:]) / half
    cases = {name: value[f"case_{name}"] for name in CASES}
    kept = [a + b for a, b in zip(cases["residual"], cases["agreement"], strict=True)]
    surest = measures["surest"]
    sure, unsure = surest["agreement_of_surest_tenth"], surest["agreement_of_least_sure_tenth"]
    return [
        Line(
            "3.2, figure 2",
            "shallow patterns dominate the lower layers, semantic ones the upper",
            f"triggers covered by shallow patterns: {share(value['shallow'])}",
            verdict(lower > upper),
            "Fewer with each layer: in most rows of its training, the first saw six tokens only."
            if lower > upper
            else "Atlas's text is made of templates, so that prefixes of one topic also end alike.",
        ),
        Line(
            "3.1",
            "people saw a pattern in every sampled key, 3.6 a key, over 65–80% of its triggers",
            f"by machine, shallow ones only: {share(value['shallow_keys'])} of keys are shallow",
            "not comparable",
            "People also see topics, which the rule for shallow patterns does not.",
        ),
        Line(
            "3.2, figure 3",
            "removing the last token changes a coefficient most, and most in the lower layers",
            f"last {share(value['removed_last'])}; first {share(value['removed_first'])}",
            "yes, but not less above"
            if all(a < b for a, b in zip(last, first, strict=True)) and last[-1] <= last[0]
            else verdict(all(a < b for a, b in zip(last, first, strict=True))),
            "The last token matters most everywhere; that it matters in the upper layers as well is perhaps due to the "
            "templates of Atlas's text, in which what may follow hangs on the last word.",
        ),
        Line(
            "4.1, figure 4",
            "agreement is near zero in layers 1–10 of 16 and rises to 3.5% above; chance is 0.0004%",
            f"{share(value['agreement'])}; chance {share(value['agreement_dealt'])}",
            verdict(agreement[-1] > agreement[0]),
            "Far above chance in every layer, most in layer 0, to which Atlas's recipe moves recall. Atlas has a "
            "hundredth of the tokens and few templates, so a next token is easier to hold.",
        ),
        Line(
            "4.1, figure 5",
            "the next token's rank in the value gets better with the layer",
            f"median rank of {vocabulary:,}: {whole(value['rank'])}; random {whole(value['rank_dealt'])}",
            verdict(rank[-1] < rank[0]),
            "Better than random everywhere, best in layer 0, for the same reason.",
        ),
        Line(
            "4.2, table 2",
            "97 of the 100 surest values are in layers 11–16, and 46 agree with one of their key's top 50 triggers",
            f"by layer {share(surest['by_layer'])}; {surest['agree_with_a_trigger']} of {SUREST} agree with one "
            f"of {TOP}",
            "in part",
            "Sure values agree with their keys, as in the paper; they stand lower, as agreement by layer does.",
        ),
        Line(
            "4.2, figure 6",
            "agreement grows with how sure a value is",
            f"surest tenth {sure:.1%}, least sure {unsure:.1%}",
            verdict(sure > unsure),
            "The same relation, over all layers.",
        ),
        Line(
            "5.1, figure 7",
            "10–50% of 4,096 memories of a layer are active (m > 0)",
            f"{share(value['active_sign'])} of 2,560",
            "not comparable",
            "A gated coefficient, silu(g) u, has the sign of a product: half of them are above zero. ReLU gives none "
            "below.",
        ),
        Line(
            "5.1, figure 8",
            "in at least 68% of examples the layer's prediction is that of none of its memories",
            share(value["zero_agreement"]),
            verdict(min(zero) >= 0.68),
            "Among 2,530 tokens, not 267,744, some 1,300 active memories meet the layer's own more often; still the "
            "upper layers compose more than the lowest.",
        ),
        Line(
            "5.2, figure 9",
            "a third of predictions are final in the bottom layers; the share grows to the top",
            share(value["settled"]),
            "in part" if settled == sorted(settled) and settled[0] < 0.3 else verdict(settled == sorted(settled)),
            "It grows with the layer. At layer 0 the stream holds little but the token itself; one layer of three is "
            "many of sixteen.",
        ),
        Line(
            "5.2, figure 11",
            "the residual's prediction is mostly kept; where it changes, rarely to the feed-forward's, mostly to a "
            "compromise",
            f"residual {share(value['case_residual'])}; feed-forward {share(value['case_feed-forward'])}; agreement "
            f"{share(value['case_agreement'])}; compromise {share(value['case_compromise'])}",
            "in part" if min(kept[1:]) > 0.5 and kept[0] < 0.5 else verdict(min(kept) > 0.5),
            "Layer 0 writes the first prediction there is; above it the residual is kept. Where it is not, the "
            "feed-forward layer wins about as often as a compromise.",
        ),
        Line(
            "5.2, table 3",
            "where the last layer turns the prediction, the new word is mostly far from the old one in meaning",
            f"it turns {measures['shifted']:.1%} of predictions; examples below",
            "not comparable",
            "People judged the paper's cases; ours are listed to be read.",
        ),
    ]  # fmt: skip


def table_of(lines: list[Line]) -> str:
    """Return the comparison as Markdown."""
    head = "| section | the paper | Atlas, layers 0 to 2 | agrees | why |\n|---|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shifts_of(measures: dict[str, Any]) -> str:
    """Return positions at which the last layer turns the prediction, as Markdown."""
    head = "| text | without the layer | the layer alone | with the layer |\n|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(shift.values())} |\n" for shift in measures["shifts"])


@click.command()
@click.option("--tokens", default=40_000, show_default=True, help="Number of tokens of new documents.")
def main(tokens: int) -> None:
    """Inspect Atlas; write figures and comparison."""
    editable, source, rng = ffedit.load("atlas"), corpus.Corpus(table.load()), Random(SEED)
    with tempfile.TemporaryDirectory() as name, progress_bars() as progress:
        text = Path(name) / "documents.jsonl"
        documents = (json.dumps({"text": source.document(rng)}) + "\n" for _ in range(tokens // 12))
        text.write_text("".join(documents), encoding="utf-8")
        measures = measure(editable, Positions.of(editable, ffedit.Corpus(text, tokens)), progress)
    lines = compare(measures, editable.vocabulary)
    command = f"python evaluations/scripts/atlas_inspect.py --tokens {tokens}"
    record = {
        "command": command,
        "model": {"name": editable.name, "fingerprint": fingerprint(editable)},
        "seed": SEED,
        "comparison": [line._asdict() for line in lines],
        **measures,
        "versions": versions(),
    }
    (HERE / "atlas-inspect.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    words = f"# Atlas beside the paper\n\n    {command}\n\n{INTRODUCTION}\n\n{table_of(lines)}\n"
    turned = f"## Where the last layer turns the prediction\n\n{shifts_of(measures)}"
    (HERE / "atlas-inspect.md").write_text(words + turned, encoding="utf-8")
    click.echo(table_of(lines))


if __name__ == "__main__":
    main()
