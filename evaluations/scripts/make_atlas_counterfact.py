"""Make `NAME-counterfact.json`: counterfactual edits for an embedded model, in CounterFact's own record format.

    python evaluations/scripts/make_atlas_counterfact.py [--model atlas] [--seed 0] [--count 500]
    python evaluations/scripts/make_atlas_counterfact.py --seed 1 --count 300 --apart development.json

The first command also writes `edits/NAME-100.jsonl`, a batch of 100 of them in ffedit's own form.

Each (subject, relation) occurs once. The new object is drawn from the objects of the same relation; the old fact is
one that the model produces, and the new object is less likely than the old one. The prompt is a trained template; the
paraphrases are the template that training never showed with this fact, then trained ones. Neighbors are other
subjects with the same object. The subject's other facts are separated (extensions of the format): a fact that follows
from the edit is `portability` if the table gives its new answer, and is otherwise left out; the others, which should
stay, are `same_subject` (see `follows`). Subjects of the tuning split never occur in the reporting one. The second
command makes more edits to develop on, about no reporting subject.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
from common import facts_of
from follows import Consequences
from make_edits import Known, record_of

import ffedit
from ffedit.evaluator.formulas import success
from ffedit.evaluator.responses import ask
from ffedit.facts.formats import parse_record
from ffedit.inference import generation
from ffedit.model.tokenization import encode

# The recipe of Atlas stands beside the scripts.
sys.path.append(str(Path(__file__).parents[1]))
from atlas.recipe import RECIPES
from atlas.table import held_out, load

HERE = Path(__file__).parents[1]
TUNING, PARAPHRASES, NEIGHBORS = 100, 3, 5


@click.command()
@click.option("--model", default="atlas", show_default=True, type=click.Choice(list(RECIPES)))
@click.option("--seed", default=0, show_default=True)
@click.option("--count", default=500, show_default=True)
@click.option("--apart", type=click.Path(path_type=Path), help="File for edits of no reporting subject, instead.")
def main(model: str, seed: int, count: int, apart: Path | None) -> None:
    """Draw the edits, keep those that the model allows, split them by subject."""
    editable, table, rng = ffedit.load(model), load().about(RECIPES[model].kinds), random.Random(seed)
    out = HERE / "data" / f"{model}-counterfact.json"
    reported: set[str] = {fact.subject for fact in facts_of("reporting", None, out)} if apart else set()
    consequences = Consequences({relation.name: relation.facts for relation in table.relations.values()})
    triples = [triple for triple in table.triples if triple.subject not in reported]
    rng.shuffle(triples)
    records: list[dict[str, Any]] = []
    for triple in triples:
        relation = table.relations[triple.relation]
        new = rng.choice(sorted(set(relation.facts.values()) - {triple.object}))
        prompt, *rest = rng.sample(relation.trained(triple.subject), len(relation.templates) - 1)
        unseen = relation.templates[held_out(triple.subject, relation.name)]
        mates = [s for s, o in relation.facts.items() if o == triple.object and s != triple.subject]
        if len(records) < count and known(editable, prompt.format(triple.subject), triple.object, new):
            subject, old, paraphrases = triple.subject, triple.object, [unseen, *rest[: PARAPHRASES - 1]]
            near = rng.sample(mates, min(NEIGHBORS, len(mates)))
            neighbors = [Known(relation.name, mate, old, tuple(relation.trained(mate))) for mate in near]
            record = record_of(relation.name, subject, prompt, paraphrases, old, new, neighbors, rng)
            record["case_id"] = len(records)
            for other in table.subjects[triple.subject]:
                if other.relation != triple.relation:
                    templates = rng.sample(table.relations[other.relation].trained(triple.subject), 2)
                    probe = consequences.probe(triple.relation, triple.object, new, other.relation, other.object)
                    if probe is not None:
                        kind, answer = probe
                        record[kind] += [{"prompt": t.format(triple.subject), "target": answer} for t in templates]
            records.append(record)
    if apart:
        write(apart, [record | {"split": "development"} for record in records])
        return
    # The first subjects, with all their edits, are for tuning.
    tuning: set[str] = set()
    for record in records:
        if sum(r["requested_rewrite"]["subject"] in tuning for r in records) < TUNING:
            tuning.add(record["requested_rewrite"]["subject"])
    for record in records:
        if record["requested_rewrite"]["subject"] in tuning:
            record["split"] = "tuning"
    write(out, records)
    write_batch(model, [record for record in records if record["split"] == "reporting"])


def write(out: Path, records: list[dict[str, Any]]) -> None:
    """Write the records, one on each line, and print how many each split has."""
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{out}:", *(f"{n} for {split}" for split, n in Counter(r["split"] for r in records).items()))


def write_batch(model: str, records: list[dict[str, Any]]) -> None:
    """Write the first 100 edits of different subjects, in ffedit's own form, as an example of a batch."""
    batch: dict[str, ffedit.Fact] = {}
    for record in records:
        fact = parse_record(record)
        batch.setdefault(fact.subject, fact)
    lines = [json.dumps(fact.to_dict(), ensure_ascii=False) for fact in list(batch.values())[:100]]
    (HERE.parent / "edits" / f"{model}-100.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def known(editable: ffedit.Editable, prompt: str, old: str, new: str) -> bool:
    """Return whether greedy generation gives `old`, and `new` is less likely."""
    true, false = (encode(editable.tokenizer, prompt, answer) for answer in (old, new))
    generated = generation.continuations(editable, [true.ids[: true.answer]], len(true.target_ids))[0]
    answers = ask(editable, [true, false])
    return tuple(generated) == true.target_ids and success(answers[true].log_probs, answers[false].log_probs)


if __name__ == "__main__":
    main()
