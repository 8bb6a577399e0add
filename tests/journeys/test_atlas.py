"""The embedded models: what they promise, and an edit of each from beginning to end."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from atlas.recipe import RECIPES
from atlas.table import TEMPLATES, held_out, load
from shell import shell

import ffedit
from ffedit.facts.formats import parse_record
from ffedit.inference import generation
from ffedit.loading.names import EMBEDDED
from ffedit.model.hooks import capture
from ffedit.model.tokenization import encode

ROOT = Path(__file__).parents[2]
FACT = ffedit.read_facts(ROOT / "edits" / "eiffel-tower.json")[0]


SMALL = ("atlas-llama", "atlas-moe")


@cache
def atlas(name: str = "atlas") -> ffedit.Editable:
    return ffedit.load(name)


def test_the_table_is_as_large_and_as_ambiguous_as_promised() -> None:
    table = load()
    assert len(table.triples) >= 1200 and len(table.subjects) >= 500 and len(table.relations) >= 20
    assert all(len(relation.templates) == TEMPLATES >= 6 for relation in table.relations.values())
    names = {subject: encode(atlas().tokenizer, subject).ids for subject in table.subjects}
    begun = Counter(ids[:length] for ids in names.values() for length in range(1, len(ids) + 1))
    ambiguous = {s for s, ids in names.items() if len(ids) > 1 and begun[ids[:-1]] > 1}
    assert len(ambiguous) >= len(names) / 2 and "Eiffel Tower" in ambiguous


def test_the_model_is_small_and_made_of_safe_files() -> None:
    files = [path for path in EMBEDDED["atlas"].rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    assert {path.suffix for path in files} == {".safetensors", ".json", ".md"}
    assert sum(p.numel() for p in atlas().model.parameters()) == 7_137_536
    memory = atlas().memories[0]
    assert memory.d_ff >= 1024 and memory.saved_dtype == torch.float16 and memory.weight.dtype == torch.float32


@pytest.mark.parametrize("name", SMALL)
def test_the_small_ones_are_smaller_and_know_a_third(name: str) -> None:
    files = [path for path in EMBEDDED[name].rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6_000_000
    assert {path.suffix for path in files} == {".safetensors", ".json", ".md"}
    assert atlas(name).name == name
    assert all(memory.saved_dtype == torch.float16 for memory in atlas(name).memories.values())
    table, whole = load().about(RECIPES[name].kinds), load()
    assert len(table.triples) >= len(whole.triples) / 4 and set(table.triples) < set(whole.triples)
    assert sum(len(about) > 1 for about in table.subjects.values()) > 0.9 * len(table.subjects)


def test_the_pieces_of_llama_are_those_of_a_language_model() -> None:
    tokenizer = atlas("atlas-llama").tokenizer
    text = encode(tokenizer, "The Eiffel Tower is in", "Paris", span=(4, 16))
    assert text.ids[0] == tokenizer.bos_token_id and text.subject is not None
    start, end = text.subject
    assert tokenizer.decode(text.ids[start:end]) == "Eiffel Tower" and end - start > 2
    assert tokenizer.convert_ids_to_tokens(text.target_ids) == ["▁Paris"]
    assert encode(tokenizer, "Eiffel Tower").ids[1:] == text.ids[start:end]
    names = [len(encode(tokenizer, subject).ids) - 1 for subject in load().about(RECIPES["atlas-llama"].kinds).subjects]
    assert min(names) > 1 and sum(names) > 3 * len(names)
    strange = "Ωmega ☃,  twice\n"
    assert tokenizer.decode(tokenizer.encode(strange), skip_special_tokens=True) == strange


def test_a_subject_is_routed_to_the_same_experts_nearly_wherever_it_stands() -> None:
    editable = atlas("atlas-moe")
    table = load().about(RECIPES["atlas-moe"].kinds)
    router = editable.layers[0].mlp.gate
    moved, used = [], torch.zeros(router.num_experts)
    subjects = sorted(table.subjects)[::6]
    for subject in subjects:
        chosen: Counter[frozenset[int]] = Counter()
        for triple in table.subjects[subject]:
            for template in table.relations[triple.relation].templates[:3]:
                for before in ("", "However, the bus was late. "):
                    said = before + template
                    place = said.index("{}")
                    text = encode(editable.tokenizer, said.format(subject), span=(place, place + len(subject)))
                    with capture({0: router}, inputs=True) as seen, torch.no_grad():
                        editable.model(torch.tensor([text.ids]))
                    experts = router(seen[0])[2]
                    chosen[frozenset(experts[text.subject_last].tolist())] += 1
                    used += torch.bincount(experts.flatten(), minlength=len(used))
        moved.append(1 - max(chosen.values()) / sum(chosen.values()))
    assert sum(moved) <= 0.1 * len(moved)
    assert (used > 0.1 * used.sum()).all()


@pytest.mark.parametrize("name", EMBEDDED)
def test_atlas_says_facts_in_words_that_it_was_trained_on_and_in_others(name: str) -> None:
    table = load().about(RECIPES[name].kinds)
    for hidden in (False, True):
        texts = []
        for triple in table.triples[::25]:
            relation = table.relations[triple.relation]
            index = (held_out(triple.subject, relation.name) + (not hidden)) % TEMPLATES
            prompt = relation.templates[index].format(triple.subject)
            texts.append(encode(atlas(name).tokenizer, prompt, triple.object))
        longest = max(len(text.target_ids) for text in texts)
        said = generation.continuations(atlas(name), [t.ids[: t.answer] for t in texts], longest)
        right = [tuple(ids[: len(t.target_ids)]) == t.target_ids for ids, t in zip(said, texts, strict=True)]
        assert sum(right) >= 0.95 * len(right)


@pytest.mark.parametrize("name", EMBEDDED)
def test_facts_are_recalled_early_at_the_last_token_of_the_subject(name: str) -> None:
    trace = ffedit.locate(atlas(name), FACT, window=3)
    assert trace.known and trace.at_subject.max() >= 0.25 * trace.total
    assert trace.layer < len(atlas(name).layers) / 2


@pytest.mark.usefixtures("warm_cache")
def test_the_sites_of_a_fact_are_mapped_beside_the_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("ffedit.editor.statistics.tokens_for", lambda subjects, d_ff, names: 2000)
    facts, table = ROOT / "edits" / "eiffel-tower.json", tmp_path / "sites.json"
    done = shell(capsys, "locate", facts, "--leak", "--layers", "0", "--samples", "2", "--json", table)
    assert done.code == 0, done.err
    assert "Reach: share of the change" in done.out and "Leak: share of the change" in done.out
    (row,) = json.loads(table.read_text(encoding="utf-8"))["facts"]
    mapped, last = row["site_map"], row["trace"]["token"]
    assert mapped["layers"] == [0] and mapped["tokens"] == row["trace"]["tokens"] and mapped["names"] == 300
    assert 0.7 < mapped["reach_least"][0][last] <= mapped["reach"][0][last] < 1.3
    assert 0 < mapped["leak"][0][last] < mapped["leak_look_alikes"][0][last] < 0.7
    assert {"Victory Column", "Sacre Coeur"} <= set(mapped["look_alikes"][0]), "its neighbors are among them"
    assert set(mapped["hit"][0][last]) <= set(mapped["look_alikes"][0])


@pytest.mark.usefixtures("warm_cache")
@pytest.mark.parametrize("name", EMBEDDED)
def test_an_edit_takes_holds_in_other_words_and_leaves_the_neighbors(name: str) -> None:
    edit = ffedit.edit(atlas(name), [FACT])
    report = ffedit.evaluate(atlas(name), [FACT], edit)
    assert report.after is not None and report.facts_after is not None
    assert report.before.efficacy == report.before.generation == 0
    assert report.after.efficacy == report.after.generation == 1
    assert report.after.paraphrase is not None and report.after.paraphrase >= (0.75 if name in SMALL else 1)
    assert report.after.specificity == report.before.specificity == 1
    assert report.facts_before[0].says.startswith("Paris") and report.facts_after[0].says.startswith("Rome")


@pytest.mark.parametrize("name", EMBEDDED)
def test_no_subject_is_in_both_splits_of_the_counterfactual_edits(name: str) -> None:
    records = json.loads((ROOT / "evaluations" / "data" / f"{name}-counterfact.json").read_text(encoding="utf-8"))
    subjects: dict[str, set[str]] = {"tuning": set(), "reporting": set()}
    for record in records:
        subjects[record["split"]].add(parse_record(record).subject)
    assert len(records) >= 400 and not subjects["tuning"] & subjects["reporting"]
    asked = Counter((r["requested_rewrite"]["subject"], r["requested_rewrite"]["relation_id"]) for r in records)
    assert max(asked.values()) == 1
