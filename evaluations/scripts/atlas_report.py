"""What an embedded model knows, and where it recalls it.

    python evaluations/scripts/atlas_report.py [--model atlas]

Knowledge: free greedy generation of the whole object, for every fact of its table, from one trained template (drawn by
seed) and from the held-out one. Recall: average causal tracing (3σ noise on the subject, ten samples, feed-forward
outputs in windows of three layers) over 300 known facts, drawn by seed, whose subject needs its last token.
"""

import json
import random
import sys
from collections import defaultdict
from pathlib import Path

import click

import ffedit
from ffedit.editor.provenance import versions
from ffedit.inference import generation
from ffedit.model.tokenization import encode

# The recipe of Atlas stands beside the scripts.
sys.path.append(str(Path(__file__).parents[1]))
from atlas.recipe import RECIPES
from atlas.table import held_out, load

WINDOW, SAMPLES, TRACED = 3, 10, 300


def said(editable: ffedit.Editable, prompts: list[str], objects: list[str]) -> list[bool]:
    """Return for each object whether greedy generation gives it after its prompt."""
    texts = [encode(editable.tokenizer, prompt, answer) for prompt, answer in zip(prompts, objects, strict=True)]
    longest = max(len(text.target_ids) for text in texts)
    new = generation.continuations(editable, [text.ids[: text.answer] for text in texts], longest)
    return [tuple(ids[: len(t.target_ids)]) == t.target_ids for ids, t in zip(new, texts, strict=True)]


@click.command()
@click.option("--model", default="atlas", show_default=True, type=click.Choice(list(RECIPES)))
@click.option("--seed", default=0, show_default=True)
def main(model: str, seed: int) -> None:
    """Measure knowledge and recall; write `NAME-report.json`."""
    editable, table, rng = ffedit.load(model), load().about(RECIPES[model].kinds), random.Random(seed)
    triples = list(table.triples)
    chosen = [rng.choice(table.relations[t.relation].trained(t.subject)) for t in triples]
    hidden = [table.relations[t.relation].templates[held_out(t.subject, t.relation)] for t in triples]
    objects = [t.object for t in triples]
    from_trained = said(editable, [p.format(t.subject) for p, t in zip(chosen, triples, strict=True)], objects)
    from_hidden = said(editable, [p.format(t.subject) for p, t in zip(hidden, triples, strict=True)], objects)

    names = {s: encode(editable.tokenizer, s).ids for s in table.subjects}
    by_prefix = defaultdict(set)
    for subject, ids in names.items():
        for length in range(1, len(ids) + 1):
            by_prefix[ids[:length]].add(subject)
    ambiguous = {s for s, ids in names.items() if len(ids) > 1 and len(by_prefix[ids[:-1]]) > 1}
    candidates = [
        (t, p) for t, p, ok in zip(triples, chosen, from_trained, strict=True) if ok and t.subject in ambiguous
    ]
    traced = rng.sample(candidates, min(TRACED, len(candidates)))
    facts = [ffedit.Fact(t.subject, p, None, t.object) for t, p in traced]
    traces = ffedit.locate_all(editable, facts, window=WINDOW, samples=SAMPLES, seed=seed)
    lengths = defaultdict(list)
    for trace in traces.traces:
        lengths[trace.subject[1] - trace.subject[0]].append(trace)
    best = int(traces.at_subject.argmax())
    report = {
        "model": model,
        "facts": len(triples),
        "subjects": len(names),
        "relations": len(table.relations),
        "ambiguous_subjects": len(ambiguous),
        "knowledge": {"trained": sum(from_trained) / len(triples), "held_out": sum(from_hidden) / len(triples)},
        "trace": {
            "facts": len(facts),
            "window": WINDOW,
            "samples": SAMPLES,
            "clean": sum(t.clean for t in traces.traces) / len(facts),
            "corrupted": sum(t.corrupted for t in traces.traces) / len(facts),
            "total": traces.total,
            "at_subject_last": traces.at_subject.tolist(),
            "alone": traces.alone.tolist(),
            "share_of_total": float(traces.at_subject[best]) / traces.total,
            "by_subject_length": {
                str(n): {
                    "facts": len(group),
                    "total": sum(t.total for t in group) / len(group),
                    "at_subject_last": ffedit.TraceSet(tuple(group)).at_subject.tolist(),
                }
                for n, group in sorted(lengths.items())
            },
        },
        "versions": versions(),
    }
    (Path(__file__).parents[1] / "reports" / f"{model}-report.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
