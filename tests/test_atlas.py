"""The embedded model: what it promises, and an edit of it from beginning to end."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import torch

import ffedit
from ffedit import readout
from ffedit.atlas.table import TEMPLATES, held_out, load
from ffedit.checkpoint import ATLAS
from ffedit.formats import parse_record
from ffedit.tokens import encode

ROOT = Path(__file__).parents[1]
FACT = ffedit.read_facts(ROOT / "edits" / "eiffel-tower.json")[0]


@cache
def atlas() -> ffedit.Editable:
    return ffedit.load("atlas")


def test_the_table_is_as_large_and_as_ambiguous_as_promised() -> None:
    table = load()
    assert len(table.triples) >= 1200 and len(table.subjects) >= 500 and len(table.relations) >= 20
    assert all(len(relation.templates) == TEMPLATES >= 6 for relation in table.relations.values())
    names = {subject: encode(atlas().tokenizer, subject).ids for subject in table.subjects}
    begun = Counter(ids[:length] for ids in names.values() for length in range(1, len(ids) + 1))
    ambiguous = {s for s, ids in names.items() if len(ids) > 1 and begun[ids[:-1]] > 1}
    assert len(ambiguous) >= len(names) / 2 and "Eiffel Tower" in ambiguous


def test_the_model_is_small_and_made_of_safe_files() -> None:
    files = [path for path in ATLAS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    assert {path.suffix for path in files} == {".safetensors", ".json", ".md"}
    assert sum(p.numel() for p in atlas().model.parameters()) == 7_285_248
    memory = atlas().memories[0]
    assert memory.d_ff >= 1024 and memory.saved_dtype == torch.float16 and memory.weight.dtype == torch.float32


def test_it_says_facts_in_words_that_it_was_trained_on_and_in_others() -> None:
    table = load()
    for hidden in (False, True):
        texts = []
        for triple in table.triples[::25]:
            relation = table.relations[triple.relation]
            index = (held_out(triple.subject, relation.name) + (not hidden)) % TEMPLATES
            prompt = relation.templates[index].format(triple.subject)
            texts.append(encode(atlas().tokenizer, prompt, triple.object))
        said = readout.continuations(atlas(), [t.ids[: t.answer] for t in texts], 5)
        right = [tuple(ids[: len(t.target_ids)]) == t.target_ids for ids, t in zip(said, texts, strict=True)]
        assert sum(right) >= 0.95 * len(right)


def test_it_is_recalled_early_at_the_last_token_of_the_subject() -> None:
    trace = ffedit.locate(atlas(), FACT, window=3)
    assert trace.known and trace.at_subject.max() >= 0.25 * trace.total
    assert trace.layer < len(atlas().layers) / 2


def test_an_edit_takes_holds_in_other_words_and_leaves_the_neighbors() -> None:
    edit = ffedit.edit(atlas(), [FACT])
    report = ffedit.evaluate(atlas(), [FACT], edit)
    assert report.after is not None and report.facts_after is not None
    assert report.before.efficacy == report.before.generation == 0
    assert report.after.efficacy == report.after.generation == report.after.paraphrase == 1
    assert report.after.specificity == report.before.specificity == 1
    assert report.facts_before[0].says.startswith("Paris") and report.facts_after[0].says.startswith("Rome")


def test_no_subject_is_in_both_splits_of_the_counterfactual_edits() -> None:
    records = json.loads((ROOT / "evaluations" / "atlas-counterfact.json").read_text(encoding="utf-8"))
    subjects: dict[str, set[str]] = {"tuning": set(), "reporting": set()}
    for record in records:
        subjects[record["split"]].add(parse_record(record).subject)
    assert len(records) >= 400 and not subjects["tuning"] & subjects["reporting"]
    asked = Counter((r["requested_rewrite"]["subject"], r["requested_rewrite"]["relation_id"]) for r in records)
    assert max(asked.values()) == 1
