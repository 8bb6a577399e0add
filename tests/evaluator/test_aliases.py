"""What a model says freely counts under any name that the data accept; what is teacher-forced stays on the first."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
import zoo

from ffedit import Fact
from ffedit.evaluator import Evaluation, Scores, formulas
from ffedit.facts.formats import parse
from ffedit.model.editable import Editable

# The model says "Paris ." of the tower, "Egypt ." of the Nile and "Italy ." of the mountain.
PLAIN = Fact(
    "Eiffel tower",
    "the {} is located in",
    "Rome",
    "Berlin",
    paraphrases=["{} stands in"],
    same_subject=[{"prompt": "the city of {} is", "target": "Madrid"}],
    neighbors=[{"prompt": "Nile river stands in", "target": "Madrid"}],
    portability=[
        {"prompt": "Nile river stands in", "target": "Spain", "kind": "Reasoning"},
        {"prompt": "Mount Everest stands in", "target": "Spain", "kind": "Reasoning"},
    ],
)
# Scores that read what is said, and so may count an alias.
SAID = {
    "generation",
    "paraphrase_generation",
    "same_subject",
    "neighbor_generation",
    "portability",
    "teacher_forced_gap",
    "token_accuracy_gap",
}


def scores(editable: Editable, fact: Fact) -> Scores:
    return Evaluation(editable, [fact]).before[0].scores


def aliased(*names: str) -> Fact:
    """The same fact, with other names of every answer."""
    probes = {
        field: tuple(replace(probe, aliases=names) for probe in getattr(PLAIN, field))
        for field in ("same_subject", "neighbors", "portability")
    }
    return replace(PLAIN, target_aliases=names, **probes)


def says(editable: Editable, text: str, count: int) -> str:
    """Greedy generation, token by token, by whole passes."""
    ids = list(editable.tokenizer(text)["input_ids"])
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(editable.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return str(editable.tokenizer.decode(ids[-count:]))


def test_any_alias_counts_where_the_model_speaks_freely_and_nowhere_else() -> None:
    editable = zoo.trained("gpt2")
    before, after = scores(editable, PLAIN).to_dict(), scores(editable, aliased("piano", "Paris", "Egypt")).to_dict()
    assert {name for name in before if before[name] != after[name]} == SAID
    assert [before[name] for name in sorted(SAID)] == [0] * len(SAID)
    assert after["generation"] == after["paraphrase_generation"] == after["same_subject"] == 1
    assert after["neighbor_generation"] == 1 and after["portability"] == 0.5
    assert after["teacher_forced_gap"] == after["token_accuracy_gap"] == -1
    found = Evaluation(editable, [aliased("Egypt")]).before[0].kinds
    assert (found["portability/Reasoning"], found["portability_token_accuracy/Reasoning"]) == (0.5, 0.0)


def test_an_alias_is_said_whole_however_long_it_is() -> None:
    editable, probe = zoo.shared("gpt2"), "Nile river stands in"
    said, river = says(editable, PLAIN.text, 12), says(editable, probe, 12)
    assert not {"</s>", "<unk>", "Rome", "Spain"} & {*said.split(), *river.split()}
    assert scores(editable, aliased(said)).generation == 1
    assert scores(editable, aliased(f"{said.rsplit(' ', 1)[0]} zoo", said.replace(" ", " the ", 1))).generation == 0
    asked = {"prompt": probe, "target": "Spain"}
    for names, expected in (([river], 1), ([f"{river.rsplit(' ', 1)[0]} the"], 0)):
        fact = replace(PLAIN, portability=({**asked, "aliases": names},))
        assert scores(editable, fact).portability == expected


def test_an_alias_that_is_the_other_object_or_cannot_be_written_tells_nothing() -> None:
    editable = zoo.trained("gpt2")
    known = replace(aliased("Paris", "東京"), previous="Paris")
    assert scores(editable, known).generation == scores(editable, known).paraphrase_generation == 0
    assert scores(editable, replace(known, previous="Berlin")).generation == 1
    assert scores(editable, replace(known, previous="Paris .")).generation == 0, "the longer old object is said"


def test_the_longer_object_decides_wherever_the_shorter_one_is_asked_for() -> None:
    editable = zoo.shared("gpt2")
    said = says(editable, "Eiffel tower stands in", 4)
    fact = replace(PLAIN, target=said.split()[0], previous=said)
    assert scores(editable, fact).paraphrase_generation == 0
    assert scores(editable, replace(fact, previous="Berlin")).paraphrase_generation == 1


def test_exact_match_takes_any_name() -> None:
    assert formulas.exact_match("USA. It", "United States", aliases=["America", "USA"])
    assert not formulas.exact_match("USAF", "United States", aliases=["America", "USA"])
    assert not formulas.exact_match("York City", "New York", "York City", ["York"])
    assert not formulas.exact_match("Rome", "Roma", "Rome", ["Rome"]) and formulas.exact_match("Rome", "Rome", "Rome")


def test_the_published_records_are_scored_by_every_name_that_they_give() -> None:
    """MQuAKE's `new_answer_alias` and the aliases of a hop; KnowEdit's lists of lists."""
    editable = zoo.trained("gpt2")
    record = {
        "requested_rewrite": [
            {
                "prompt": "the {} is located in",
                "subject": "Eiffel tower",
                "question": "Eiffel tower stands in",
                "target_new": {"str": "Rome"},
                "target_true": {"str": "Berlin"},
            }
        ],
        "questions": ["Nile river stands in", "Mount Everest stands in"],
        "new_answer": "Spain",
        "new_answer_alias": ["the old Spain", "Egypt"],
        "new_single_hops": [{"question": "Eiffel tower stands in", "answer": "Rome", "answer_alias": ["Paris"]}],
    }
    (fact,) = parse(record).facts
    found = scores(editable, fact)
    assert (found.generation, found.paraphrase_generation, found.portability) == (1, 1, 1), (
        "one of its wordings is answered"
    )
    assert found.portability_token_accuracy == found.token_accuracy == 0
    # The hop of another question says nothing about this edit's object.
    other = json.loads(json.dumps(record).replace('[{"question": "Eiffel', '[{"question": "Nile'))
    assert scores(editable, parse(other).facts[0]).generation == 0
    asked = {"prompt": "Nile river stands in", "ground_truth": [["Spain", "Spain ."], ["Italy", "Egypt"]]}
    flat = {"subject": "Eiffel tower", "prompt": PLAIN.text, "target_new": "Rome", "ground_truth": "Berlin"}
    (fact,) = parse({**flat, "portability": {"Reasoning": [asked]}}).facts
    assert (scores(editable, fact).portability, scores(editable, fact).portability_token_accuracy) == (1, 0)
