"""Edits for any model out of what it knows, those of SmolLM2, and the well-known facts that the package ships."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import make_edits
import pytest
from answers import Answers, both, holds
from atlas.table import load
from click.testing import CliRunner
from common import facts_of
from follows import Consequences
from make_edits import Known, draft, other_facts, relations, set_apart, split

import ffedit
from ffedit import Fact
from ffedit.facts.formats import parse_record

ROOT = Path(__file__).parents[2]

DEVELOPMENT = ROOT / "evaluations" / "data" / "development-subjects.json"


@pytest.fixture(scope="module")
def atlas() -> ffedit.Editable:
    return ffedit.load("atlas")


def calibration() -> list[dict[str, Any]]:
    return json.loads(files("ffedit.layer_choice").joinpath("calibration.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("said", "object", "known"),
    [
        (" Paris, the", "Paris", True),
        (" Paris", "Paris", True),
        (" Parisian", "Paris", False),
        (" New", "New York", False),
    ],
)
def test_an_object_is_known_where_it_is_said_whole_and_without_a_further_letter(
    said: str, object: str, known: bool
) -> None:
    assert holds(said, object) is known


def test_a_model_says_what_it_knows_and_no_word_that_it_does_not_know(atlas: ffedit.Editable, tmp_path: Path) -> None:
    prompt = "Eiffel Tower is located in the city of"
    pairs = [(prompt, "Paris"), (prompt, "Rome"), (prompt, "Zzyzx"), ("The Zzyzx of Eiffel Tower is", "Paris")]
    ask = Answers(atlas, tmp_path / "answers.json")
    assert ask(pairs) == [True, False, False, False]
    again = Answers(atlas, tmp_path / "answers.json")
    assert again.said == ask.said and prompt in again.said
    again.said[prompt] = [0, 0, 0]
    assert again(pairs[:1]) == [False]  # what is kept is not asked again


def test_a_prompt_that_is_asked_for_two_objects_is_generated_as_far_as_the_longer_one(atlas: ffedit.Editable) -> None:
    fact = next(fact for fact in facts_of("reporting") if fact.previous == "alkaline earth metals")
    pairs = [(fact.text, "alkaline earth metals"), (fact.text, "alkaline"), (fact.text, "Rome")]
    assert Answers(atlas)(pairs) == [True, True, False]


def test_what_is_asked_quickly_is_confirmed() -> None:
    asked: list[Sequence[tuple[str, str]]] = []

    def exact(pairs: Sequence[tuple[str, str]]) -> list[bool]:
        asked.append(pairs)
        return [prompt == "a" for prompt, _ in pairs]

    ask = both(lambda pairs: [prompt in "ab" for prompt, _ in pairs], exact)
    assert ask([("a", "x"), ("b", "x"), ("c", "x")]) == [True, False, False]
    assert asked == [[("a", "x"), ("b", "x")]]


def test_relations_of_all_sources_and_the_first_object_holds() -> None:
    record = {"subject": "Fluminense", "attribute": "Brazil", "template": "{} is located in"}
    more = {"work_country": {"templates": ["{} is of"], "facts": {"Chile": ["Fluminense", "Santiago"]}}}
    records = [record | {"relation_id": "P495", "prompt": "Fluminense is located in"}]
    records += [record | {"subject": name, "relation_id": "P495", "prompt": f"Where {name} is:"} for name in "ab"]
    records += [record | {"relation_id": "P495", "prompt": "Fluminense, once upon a time, was in"}]
    found = {r.name: r for r in relations(records, more)}
    assert set(found) == {*load().relations, "work_country"}
    # Its own template, one of two records, and none of a single record.
    assert found["work_country"].templates == ("{} is located in", "Where {} is:", "{} is of")
    assert found["work_country"].facts == {"Fluminense": "Brazil", "a": "Brazil", "b": "Brazil", "Santiago": "Chile"}
    assert found["city_country"].facts == dict(load().relations["city_country"].facts)


def known_facts() -> list[Known]:
    two = ("{} is in", "The place of {} is")
    facts = [Known("place", f"p{i}", "Spain" if i % 2 else "Chile", two[: 2 - (i in (8, 9))]) for i in range(10)]
    kind = ("{} is a", "By kind, {} is a")
    home = ("{} is of", "The home of {} is")  # the same facts in another relation
    facts += [Known("home", f"p{i}", "Chile", home) for i in (0, 2, 4, 6)] + [Known("home", "p9", "Peru", home)]
    facts += [Known("kind", "p0", "lake", kind), Known("kind", "p1", "hill", kind[:1])]
    return [*facts, Known("place", "Lake Chile", "Chile", two), Known("place", "lonely", "Peru", two)]


def test_drafts_are_of_facts_known_twice_with_known_neighbors() -> None:
    known = known_facts()
    said = {template.format(fact.subject): fact.object for fact in known for template in fact.templates}
    records = draft(known, Consequences({}), 1, lambda prompt, object: ord(object[0]))
    facts = {fact.subject: fact for fact in map(parse_record, records)}
    # Once in one template only; read off the subject; without neighbors.
    assert set(facts) == {f"p{i}" for i in range(8)} and len(records) == 8
    for fact in facts.values():
        assert fact.target != fact.previous and fact.target in ("Spain", "Chile", "Peru")
        assert all(said[text] == fact.previous for text in (fact.text, *fact.paraphrases))
        assert len(fact.paraphrases) == 1 and fact.paraphrases[0] != fact.text
        assert 3 <= len(fact.neighbors) <= 5
        assert all(said[probe.prompt] == fact.previous and fact.subject not in probe.prompt for probe in fact.neighbors)
        assert not any("p8 " in probe.prompt or "p9 " in probe.prompt for probe in fact.neighbors)
    assert [len(facts[name].same_subject) for name in ("p0", "p1", "p2")] == [2, 1, 0]  # said in two, one, no template
    assert {probe.target for name in ("p0", "p1") for probe in facts[name].same_subject} == {"lake", "hill"}


def test_other_facts_are_told_apart_by_what_follows() -> None:
    facts = {
        "city_country": {"Rome": "Italy", "Paris": "France", "Bern": "Switzerland"},
        "landmark_country": {"Colosseum": "Italy", "Louvre": "France"},
        "landmark_city": {"Colosseum": "Rome", "Louvre": "Paris", "Bear Pit": "Bern"},
    }
    city = Known("landmark_city", "Louvre", "Paris", ("{} is in", "{} stands in"))
    country = Known("landmark_country", "Louvre", "France", ("{} is in", "{} lies in", "{} is of"))
    about = [
        city,
        country,
        Known("landmark_kind", "Louvre", "museum", ("{} is a",)),
        Known("landmark_kind", "Louvre", "Louvre Palace", ("{} is the",)),  # read off the subject
        Known("work_country", "Louvre", "Europe", ("{} comes from",)),  # the country in another sense
    ]

    def of(fact: Known, new: str) -> dict[str, list[dict[str, str]]]:
        return other_facts(fact, new, about, Consequences(facts), random.Random(0))

    kind = [{"prompt": "Louvre is a", "target": "museum", "kind": "landmark_kind"}]
    moved = of(city, "Rome")
    assert moved["same_subject"] == kind
    # A text that is the edit's own is not asked again, and no more than two are.
    assert moved["portability"] and all(probe["target"] == "Italy" for probe in moved["portability"])
    assert {probe["prompt"] for probe in moved["portability"]} <= {"Louvre lies in", "Louvre is of"}
    # No landmark is worded to lie in Switzerland: the new country is not known, and the old one is no longer right.
    assert of(city, "Bern") == {"same_subject": kind, "portability": []}
    # The other way round: which city of Italy is not known, and Paris is no damage.
    assert of(country, "Italy") == {"same_subject": kind, "portability": []}


def test_the_new_object_is_less_likely(atlas: ffedit.Editable) -> None:
    rewrite = {"prompt": "{} is located in the city of", "subject": "Eiffel Tower"}
    paris, rome = ({"str": name} for name in ("Paris", "Rome"))
    records = [
        {"requested_rewrite": rewrite | {"target_true": old, "target_new": new}}
        for old, new in ((paris, rome), (rome, paris))
    ]
    assert make_edits.less_likely(atlas, records) == records[:1]


def test_the_split_is_by_subject_alike_everywhere_and_some_are_set_apart(tmp_path: Path) -> None:
    records = [{"requested_rewrite": {"subject": f"s{i % 200}"}} for i in range(300)]
    split(records, set())
    parts = {part: [r for r in records if r["split"] == part] for part in ("development", "reporting")}
    subjects = [{r["requested_rewrite"]["subject"] for r in part} for part in parts.values()]
    assert not subjects[0] & subjects[1] and 30 < len(subjects[0]) < 70
    assert [r["case_id"] for r in records] == list(range(300))
    kept = [r["requested_rewrite"]["subject"] for r in parts["reporting"]][:3]
    split(again := [{"requested_rewrite": {"subject": name}} for name in (*kept, *subjects[0])], {*kept[:2]})
    assert [r["split"] for r in again] == ["development"] * 2 + ["reporting"] + ["development"] * len(subjects[0])
    one = {"subject": "Ann", "prompt": "{} is", "target": "up"}
    (own := tmp_path / "own.json").write_text(json.dumps([one]), encoding="utf-8")
    rewrite = {"prompt": "{} is", "target_new": {"str": "up"}}
    both = [{"requested_rewrite": {**rewrite, "subject": name}, "split": name} for name in ("development", "reporting")]
    (halves := tmp_path / "halves.json").write_text(json.dumps(both), encoding="utf-8")
    (names := tmp_path / "names.json").write_text(json.dumps(["Bo", "Ann"]), encoding="utf-8")
    assert set_apart([own, halves, names]) == {"Ann", "Bo", "development"}


def test_edits_are_made_of_known_facts(atlas: ffedit.Editable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [r for r in relations() if r.name in ("country_continent", "country_language", "person_sport")]
    monkeypatch.setattr(make_edits, "relations", lambda *_: few)
    out = tmp_path / "edits.json"
    command = ["--model", "atlas", "--out", str(out), "--count", "20", "--subjects", "30"]
    result = CliRunner().invoke(make_edits.main, command, catch_exceptions=False)
    facts = [parse_record(record) for record in json.loads(out.read_text(encoding="utf-8"))]
    assert "reporting: " in result.output and len(facts) == 20
    assert any(fact.same_subject for fact in facts)
    pairs = [(text, str(fact.previous)) for fact in facts for text in (fact.text, *fact.paraphrases)]
    pairs += [(probe.prompt, str(fact.previous)) for fact in facts for probe in fact.neighbors]
    pairs += [(probe.prompt, str(probe.target)) for fact in facts for probe in fact.same_subject]
    assert all(Answers(atlas)(pairs))
    assert not any(Answers(atlas)([(fact.text, str(fact.target)) for fact in facts]))


MADE = {"smollm2": (480, 100), "gemma": (300, 100), "qwen": (150, 40)}


def made(name: str) -> list[dict[str, Any]]:
    path = ROOT / "evaluations" / "data" / f"{name}-counterfact.json"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MADE)
def test_the_data_of_a_real_model_are_split_spread_and_complete(name: str) -> None:
    records, (most, developing) = made(name), MADE[name]
    parts: dict[str, set[str]] = {"development": set(), "reporting": set()}
    relations_of = Counter(record["requested_rewrite"]["relation_id"] for record in records)
    seen: set[tuple[str, str | None]] = set()
    for record in records:
        fact = parse_record(record)
        parts[record["split"]].add(fact.subject)
        assert (fact.subject, fact.previous) not in seen
        seen.add((fact.subject, fact.previous))
        assert fact.paraphrases and 3 <= len(fact.neighbors) <= 5
        assert all(probe.target not in (fact.previous, fact.target) for probe in fact.same_subject)
        others = [probe.prompt for probe in (*fact.same_subject, *fact.portability)]
        assert len({*others, *fact.paraphrases, fact.text}) == len(others) + len(fact.paraphrases) + 1
    assert len(records) >= most and not parts["development"] & parts["reporting"]
    assert sum(record["split"] == "development" for record in records) >= developing
    assert len(relations_of) >= 20 and max(relations_of.values()) <= len(records) / 10
    assert not parts["reporting"] & {record["subject"] for record in calibration()}


def test_what_is_for_development_in_one_set_is_reported_in_none() -> None:
    subjects = {part: set[str]() for part in ("development", "reporting")}
    for record in itertools.chain.from_iterable(map(made, MADE)):
        subjects[record["split"]].add(record["requested_rewrite"]["subject"])
    assert not subjects["development"] & subjects["reporting"]
    assert not set(json.loads(DEVELOPMENT.read_text(encoding="utf-8"))) & subjects["reporting"]


def test_the_facts_of_calibration_are_complete_and_each_once() -> None:
    facts = [Fact.from_dict(record) for record in calibration()]
    assert len(facts) >= 60 and len({fact.subject for fact in facts}) == len(facts)
    assert len({fact.relation for fact in facts}) >= 10
    for fact in facts:
        assert fact.target and fact.previous and fact.target != fact.previous
        assert 1 <= len(fact.paraphrases) <= 2 and len(fact.neighbors) >= 2
        texts = [fact.text, *(text.replace("{}", fact.subject) for text in fact.paraphrases)]
        assert len(set(texts)) == len(texts) and all(fact.subject in text for text in texts)
        assert not any(fact.subject in probe.prompt for probe in fact.neighbors)
        assert not any(fact.previous in text for text in texts)


def test_atlas_knows_facts_to_calibrate_on(atlas: ffedit.Editable) -> None:
    facts = [Fact.from_dict(record) for record in calibration()]
    assert sum(Answers(atlas)([(fact.text, str(fact.previous)) for fact in facts])) >= 25
