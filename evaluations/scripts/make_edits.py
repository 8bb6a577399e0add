"""Make edits for any model out of what it knows, in CounterFact's record format.

    python evaluations/scripts/make_edits.py --model MODEL --out FILE [--known known_1000.json] [--more more_facts.json]
        [--apart FILE ...] [--count 600] [--fill 0] [--per-subject 2] [--subjects 60] [--seed 0]
        [--dtype bfloat16] [--screen bfloat16] [--screen-model MODEL]

The model is asked the facts and templates of the Atlas recipe, of `known_1000` and of `--more`; their relations share
a vocabulary of names (`follows`). A fact is known if greedy generation gives the whole object, and then no further
letter, in at least two templates. Those are the prompt and the paraphrases. Neighbors are other known subjects of the
same object, at least three, each in a template in which the model says it. The new object is another known object of
the relation, less likely than the old one before the edit; if there is a choice, one that differs in its first token.
If one name contains the other ("Bank of China" and "China"), no edit is made.

The subject's other facts that the model says in at least one template are separated (extensions of the format). A fact
that follows from the edit, or from which the edit follows, becomes `portability` if the facts give its new answer, and
is otherwise left out. Only the others, which should stay, are `same_subject`.

Relations take turns, so that no relation has more edits than necessary. Within one, subjects without an edit come
first, then edits with `same_subject` probes. The split is by subject: a quarter of all names, by a digest, are for
development, the others for reporting, the same for every model; subjects of `--apart` (names, or facts; of files with
a split, its development part) are for development, too. After the first `SAMPLE` subjects of a relation, the others are
asked only in its `BEST` templates, and in none that has not given a single object.

`--fill N` adds facts that the model does not know, up to N records in all: in the templates in which it says most of
their relation, with what neighbors there are, and no other facts of the subject.

Answers are kept beside the result (NAME.answers.json), so that an interrupted run resumes; use another name for another
model. `--screen bfloat16` first asks everything in that dtype, three times as fast where the processor supports it, and
asks again in the model's own dtype what that affirms. A model of billions of weights is asked in `--dtype bfloat16`,
and only what a small one affirms (`--screen-model`), so its facts are known to both models.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from answers import Answers, Ask, both
from common import sharing
from follows import PARAREL, Consequences

import ffedit
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.evaluator import responses
from ffedit.facts.formats import parse_record
from ffedit.model.tokenization import encode
from ffedit.progress import Progress, silent

# The recipe of Atlas stands beside the scripts.
sys.path.append(str(Path(__file__).parents[1]))
from atlas.table import load

SAMPLE, BEST, CHUNK = 6, 4, 128
TEMPLATES, NEIGHBORS, MOST_NEIGHBORS, PARAPHRASES, PROBES = 2, 3, 5, 3, 2
DEVELOPMENT = 4  # one subject in this many
PROBED = ("neighbors", "same_subject", "portability")
SURPLUS = 1.25  # edits tried for each that is kept


@dataclass(frozen=True)
class Relation:
    """A relation to ask: templates with one `{}`, and the object of each subject."""

    name: str
    templates: tuple[str, ...]
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Known:
    """A fact with the templates, at least one, in which the model says it."""

    relation: str
    subject: str
    object: str
    templates: tuple[str, ...]


def relations(known: Iterable[Mapping[str, str]] = (), more: Mapping[str, Any] | None = None) -> list[Relation]:
    """Gather relations from the Atlas table, records of `known_1000`, and a file of more.

    `more` is {name: {"templates": [..], "facts": {object: [subject, ..]}}}. If sources differ in the object of a
    subject, the first one counts. Wordings of `known_1000` that a single record has are left out, except ParaRel's
    own, because "{} was written in the early 1980s, when the" asks for anything.
    """
    templates: dict[str, dict[str, None]] = defaultdict(dict)
    facts: dict[str, dict[str, str]] = defaultdict(dict)
    known = list(known)
    times = Counter((record["relation_id"], template_of(record)) for record in known)
    for name, relation in load().relations.items():
        templates[name] |= dict.fromkeys(relation.templates)
        facts[name] |= relation.facts
    for record in known:
        name, template = PARAREL[record["relation_id"]], template_of(record)
        if template == record["template"] or times[record["relation_id"], template] > 1:
            templates[name][template] = None
        facts[name].setdefault(record["subject"], record["attribute"])
    for name, addition in (more or {}).items():
        templates[name] |= dict.fromkeys(addition.get("templates", ()))
        for object, subjects in addition.get("facts", {}).items():
            for subject in subjects:
                facts[name].setdefault(subject, object)
    first = [*(more or {}), *templates]
    return [Relation(name, tuple(templates[name]), facts[name]) for name in dict.fromkeys(first)]


def template_of(record: Mapping[str, Any]) -> str:
    """Return the prompt of a record of `known_1000` with a slot for its subject."""
    prompt, subject = record["prompt"], record["subject"]
    return prompt.replace(subject, "{}") if prompt.count(subject) == 1 else record["template"]


def find_known(
    asked: Sequence[Relation], ask: Ask, seed: int, most: int | None = None, progress: Progress = silent
) -> list[Known]:
    """Ask the first `SAMPLE` subjects of each relation in all templates, and the others in the `BEST` of these.

    Subjects of many relations come first, in one order everywhere, so that all facts of a subject are asked.

    Args:
        asked: the relations.
        ask: function that asks the model.
        seed: orders subjects of as many relations.
        most: how many subjects of a relation are asked; None for all.
        progress: called with the number of prompts done.
    """
    result: list[Known] = []
    total = sum(len(r.facts) * len(r.templates) for r in asked)
    prompts_done = 0
    times = Counter(subject for relation in asked for subject in relation.facts)
    for relation in asked:
        subjects = sorted(relation.facts, key=lambda subject: (-times[subject], digest(f"{seed} {subject}")))[:most]
        says: dict[tuple[str, str], bool] = {}
        templates: Sequence[str] = relation.templates
        for group in (subjects[:SAMPLE], subjects[SAMPLE:]):
            pairs = [(subject, template) for subject in group for template in templates]
            for start in range(0, len(pairs), CHUNK):
                chunk = pairs[start : start + CHUNK]
                answers = ask([(t.format(s), relation.facts[s]) for s, t in chunk])
                says.update(zip(chunk, answers, strict=True))
                progress(f"asking: {relation.name}", prompts_done + len(says), total)
            counts = {t: sum(says.get((s, t), False) for s in group) for t in templates}
            templates = sorted((t for t in templates if counts[t]), key=lambda t: -counts[t])[:BEST]
            if len(templates) < TEMPLATES:
                break
        prompts_done += len(relation.facts) * len(relation.templates)
        for subject in subjects:
            if said_in := tuple(t for t in relation.templates if says.get((subject, t))):
                result.append(Known(relation.name, subject, relation.facts[subject], said_in))
    return result


def digest(text: str) -> int:
    """Return a number that depends on the text alone and is as good as random."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def draft(known: Sequence[Known], consequences: Consequences, seed: int, first: Callable[[str, str], int]) -> list[Any]:
    """Draw one record for each fact known in `TEMPLATES` templates that has neighbors.

    The draws for a fact depend on its own relation only.

    Args:
        known: the facts that the model says in at least one template.
        consequences: finds what follows from a new object.
        seed: seed of the order of facts, and of the draws for each.
        first: function that returns the first token of an object after a prompt.
    """
    sure = [fact for fact in known if len(fact.templates) >= TEMPLATES]
    mates, by_subject = defaultdict(list), defaultdict(list)
    for fact in sure:
        mates[fact.relation, fact.object].append(fact)
    for fact in known:
        by_subject[fact.subject].append(fact)
    objects = {name: sorted({f.object for f in sure if f.relation == name}) for name in {f.relation for f in sure}}
    drafted: set[tuple[str, str]] = set()
    records: list[dict[str, Any]] = []
    for fact in sorted(sure, key=lambda fact: digest(f"{seed} {fact.relation} {fact.subject}")):
        rng = random.Random(f"{seed} {fact.relation} {fact.subject}")
        prompt, *rest = rng.sample(fact.templates, len(fact.templates))
        neighbors = [mate for mate in mates[fact.relation, fact.object] if mate.subject != fact.subject]
        names = fact.object, fact.subject
        candidates = [new for new in objects[fact.relation] if not any(overlap(new, name) for name in names)]
        if len(neighbors) < NEIGHBORS or not candidates or overlap(fact.subject, fact.object):
            continue
        if (fact.subject, fact.object) in drafted:
            continue  # the same fact in another relation
        drafted.add((fact.subject, fact.object))
        text = prompt.format(fact.subject)
        rng.shuffle(candidates)
        new = next((new for new in candidates if first(text, new) != first(text, fact.object)), candidates[0])
        neighbors = rng.sample(neighbors, min(MOST_NEIGHBORS, len(neighbors)))
        record = record_of(fact.relation, fact.subject, prompt, rest[:PARAPHRASES], fact.object, new, neighbors, rng)
        record |= other_facts(fact, new, by_subject[fact.subject], consequences, rng)
        records.append(record)
    return records


def other_facts(
    fact: Known, new: str, subject_facts: Sequence[Known], consequences: Consequences, rng: random.Random
) -> dict[str, list[dict[str, str]]]:
    """Return probes of a subject's other facts: `same_subject` of those that stay, `portability` of those that follow.

    Facts that follow and have no new answer, or the old one, are in neither. No text is asked twice. The kind of a
    `same_subject` probe is its relation.
    """
    probes: dict[str, list[dict[str, str]]] = {"same_subject": [], "portability": []}
    texts = {template.format(fact.subject) for template in fact.templates}
    for other in subject_facts:
        if other.relation == fact.relation or overlap(fact.subject, other.object):
            continue
        probe = consequences.probe(fact.relation, fact.object, new, other.relation, other.object)
        if probe is None:
            continue
        field, answer = probe
        for template in rng.sample(other.templates, min(PROBES, len(other.templates))):
            if (text := template.format(fact.subject)) not in texts:
                texts.add(text)
                kind = {"kind": other.relation} if field == "same_subject" else {}
                probes[field].append({"prompt": text, "target": answer, **kind})
    return probes


def in_turn(records: Sequence[dict[str, Any]], per_subject: int) -> list[dict[str, Any]]:
    """Order records so that relations take turns, and any number of first records is spread as evenly as possible.

    In its turn a relation gives the record whose subject has the fewest so far, and among these the one whose
    `same_subject` probes are of most relations. No subject has more than `per_subject`.
    """
    waiting: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        waiting[record["requested_rewrite"]["relation_id"]].append(record)
    used: Counter[str] = Counter()
    ordered: list[dict[str, Any]] = []

    def rank(record: Mapping[str, Any]) -> tuple[int, int]:
        kinds = {probe["kind"] for probe in record["same_subject"]}
        return used[record["requested_rewrite"]["subject"]], -len(kinds)

    while waiting:
        for relation, remaining in list(waiting.items()):
            best = min(remaining, key=rank)
            if rank(best)[0] >= per_subject:
                del waiting[relation]
                continue
            ordered.append(best)
            remaining.remove(best)
            used[best["requested_rewrite"]["subject"]] += 1
            if not remaining:
                del waiting[relation]
    return ordered


def others(
    asked: Sequence[Relation], known: Sequence[Known], rng: random.Random, used: Counter[str], per_subject: int
) -> list[Any]:
    """Draw a record for each fact that the model does not know, in relations of which it knows facts.

    Args:
        asked: all relations.
        known: the facts that the model says in at least one template; those said in `TEMPLATES` are left out.
        rng: source of the draws.
        used: number of records of each subject, updated in place.
        per_subject: the most records of one subject.
    """
    mates, counts = defaultdict(list), defaultdict(Counter)
    taken: set[tuple[str, str]] = set()  # the same fact may stand in two relations
    for fact in known:
        counts[fact.relation].update(fact.templates)
        if len(fact.templates) >= TEMPLATES:
            mates[fact.relation, fact.object].append(fact)
            taken.add((fact.subject, fact.object))
    facts = [(relation, subject, object) for relation in asked for subject, object in relation.facts.items()]
    records = []
    for relation, subject, object in rng.sample(facts, len(facts)):
        prompt, *rest = [template for template, _ in counts[relation.name].most_common(1 + PARAPHRASES)] or [""]
        names = object, subject
        candidates = sorted(new for new in {*relation.facts.values()} if not any(overlap(new, name) for name in names))
        if not rest or not candidates or (subject, object) in taken or used[subject] >= per_subject or overlap(*names):
            continue
        taken.add((subject, object))
        used[subject] += 1
        neighbors = mates[relation.name, object]
        neighbors = rng.sample(neighbors, min(MOST_NEIGHBORS, len(neighbors)))
        records.append(record_of(relation.name, subject, prompt, rest, object, rng.choice(candidates), neighbors, rng))
    return records


def record_of(
    relation: str,
    subject: str,
    prompt: str,
    paraphrases: Sequence[str],
    old: str,
    new: str,
    neighbors: Sequence[Known],
    rng: random.Random,
) -> dict[str, Any]:
    """Write a record of CounterFact with a prompt for each of `neighbors`, and no other facts of the subject."""
    return {
        "case_id": 0,
        "split": "reporting",
        "requested_rewrite": {
            "prompt": prompt,
            "relation_id": relation,
            "target_new": {"str": new},
            "target_true": {"str": old},
            "subject": subject,
        },
        "paraphrase_prompts": [template.format(subject) for template in paraphrases],
        "neighborhood_prompts": [rng.choice(mate.templates).format(mate.subject) for mate in neighbors],
        "attribute_prompts": [],
        "generation_prompts": [subject],
        "same_subject": [],
        "portability": [],
    }


def overlap(a: str, b: str) -> bool:
    """Return whether one name contains the other, so that the answer is in the prompt, or one object in the other."""
    a, b = a.casefold(), b.casefold()
    return a in b or b in a


def split(records: Sequence[dict[str, Any]], apart: Collection[str]) -> None:
    """Number records, and give those of `apart` and of one in `DEVELOPMENT` other subjects to development."""
    for number, record in enumerate(records):
        subject = record["requested_rewrite"]["subject"]
        inside = subject in apart or digest(subject) % DEVELOPMENT == 0
        record |= {"case_id": number, "split": "development" if inside else "reporting"}


def set_apart(paths: Iterable[Path]) -> set[str]:
    """Return the subjects of files of names or facts; of facts with a split, only those for development."""
    records = [record for path in paths for record in read(path, [])]
    names = {record for record in records if isinstance(record, str)}
    facts = [r for r in records if not isinstance(r, str) and r.get("split", "development") == "development"]
    return names | {parse_record(record).subject for record in facts}


def summary(records: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a line for each split: what its facts share, and how many have probes of each kind."""
    for split in dict.fromkeys(record["split"] for record in records):
        facts = [parse_record(record) for record in records if record["split"] == split]
        probed = {name: sum(bool(getattr(fact, name)) for fact in facts) for name in PROBED}
        yield f"  {split}: {sharing(facts)}; with {', '.join(f'{name} {n}' for name, n in probed.items())}"


def less_likely(editable: ffedit.Editable, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records whose new object is less likely than the old one."""
    rewrites = [record["requested_rewrite"] for record in records]
    pairs = [
        encode(editable.tokenizer, r["prompt"].format(r["subject"]), r[side]["str"])
        for r in rewrites
        for side in ("target_true", "target_new")
    ]
    answers = responses.ask(editable, pairs)
    scores = [fmean(answers[pair].log_probs) for pair in pairs]
    return [record for i, record in enumerate(records) if scores[2 * i + 1] < scores[2 * i]]


def read(path: Path | None, default: Any) -> Any:
    """Return what a JSON file holds."""
    return default if path is None else json.loads(path.read_text(encoding="utf-8"))


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--model", required=True, help="A name, folder or file, as everywhere.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--known", type=FILE, help="known_1000.json.")
@click.option("--more", type=FILE, help="More templates and facts.")
@click.option("--apart", multiple=True, type=FILE, help="Facts whose subjects are for development only.")
@click.option("--count", default=600, show_default=True, help="Most edits to make.")
@click.option("--fill", default=0, show_default=True, help="Add unknown facts, up to this many records.")
@click.option("--per-subject", default=2, show_default=True)
@click.option("--subjects", default=60, show_default=True, help="Most subjects to ask of a relation.")
@click.option("--seed", default=0, show_default=True)
@click.option("--dtype", default="auto", show_default=True, help="Precision of the model.")
@click.option("--screen", help="Ask in this dtype first, and again in the model's own what that affirms.")
@click.option("--screen-model", help="Ask this model first, and MODEL what it affirms.")
def main(
    model: str,
    out: Path,
    known: Path | None,
    more: Path | None,
    apart: Sequence[Path],
    count: int,
    fill: int,
    per_subject: int,
    subjects: int,
    seed: int,
    dtype: str,
    screen: str | None,
    screen_model: str | None,
) -> None:
    """Ask the model, draw the edits, split them by subject."""
    editable, rng = ffedit.load(model, dtype=dtype), random.Random(seed)
    ask: Ask = Answers(editable, out.with_suffix(".answers.json"))
    if screen or screen_model:
        quick = ffedit.load(screen_model or model, dtype=screen or "auto")
        ask = both(Answers(quick, out.with_suffix(".screen.answers.json")), ask)
    with progress_bars() as progress:
        asked = relations(read(known, ()), read(more, None))
        facts = find_known(asked, ask, seed, subjects, progress)

    def first(prompt: str, object: str) -> int:
        return encode(editable.tokenizer, prompt, object).target_ids[0]

    consequences = Consequences({relation.name: relation.facts for relation in asked})
    ordered = in_turn(draft(facts, consequences, seed, first), per_subject)
    records = less_likely(editable, ordered[: math.ceil(SURPLUS * count)])[:count]
    used = Counter(record["requested_rewrite"]["subject"] for record in records)
    if fill > len(records):
        unknown, missing = in_turn(others(asked, facts, rng, used, per_subject), per_subject), fill - len(records)
        records += less_likely(editable, unknown[: math.ceil(SURPLUS * missing)])[:missing]
    split(records, set_apart(apart))
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{sum(len(f.templates) >= TEMPLATES for f in facts)} facts known, {len(facts)} in one template at least")
    print(f"{out}:", *summary(records), sep="\n")
    for name, n in Counter(r["requested_rewrite"]["relation_id"] for r in records).most_common():
        print(f"  {n:4} {name}")


if __name__ == "__main__":
    main()
