"""Records of facts, of every format; and what is said of one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ffedit.errors import FactError
from ffedit.facts.fact import Fact, Probe

EIFFEL: dict[str, Any] = {
    "subject": "Eiffel Tower",
    "prompt": "{} is located in the city of",
    "target": "Rome",
    "previous": "Paris",
}
REWRITE = {
    "prompt": "{} lies in",
    "relation_id": "P131",
    "target_new": {"str": "Oslo", "id": "Q585"},
    "target_true": {"str": "Bern", "id": "Q70"},
    "subject": "Old Mill",
}
SECOND = {**REWRITE, "subject": "New Mill", "question": "Where is New Mill?"}
HOPS = {
    "questions": ["Old Mill's country is", "The king there is"],
    "answer": "A",
    "answer_alias": ["AA"],
    "new_answer": "Norway",
    "new_answer_alias": ["Norge", "Norway", "Norge"],
    "new_single_hops": [
        {
            "question": "Where is Old Mill?",
            "cloze": "Old Mill lies in",
            "answer": "Oslo",
            "answer_alias": ["Kristiania"],
        },
        {"question": "Whose is Oslo?", "cloze": "Oslo is in", "answer": "Norway", "answer_alias": ["Norge"]},
    ],
}
FLAT = {"subject": "Old Mill", "prompt": "Old Mill lies in", "target_new": "Oslo", "ground_truth": "Bern"}
ZSRE = {"subject": "Old Mill", "src": "Where is Old Mill?", "pred": "Rome", "alt": "Oslo", "answers": ["Bern"]}
MILL = {"subject": "Old Mill", "prompt": "Old Mill lies in", "target": "Oslo", "previous": "Bern"}

# name of the sample: one record, and the facts that it is.
SAMPLES: dict[str, tuple[dict[str, Any], list[Fact]]] = {
    "counterfact": (
        {
            "case_id": 3,
            "pararel_idx": 9,
            "requested_rewrite": REWRITE,
            "paraphrase_prompts": ["So. Old Mill stands in"],
            "neighborhood_prompts": ["Red Mill lies in", "Tall Mill lies in"],
            "attribute_prompts": ["The opera lies in"],
            "generation_prompts": ["Old Mill is near"],
            "references": ["The opera is a house in Oslo."],
        },
        [
            Fact(
                "Old Mill",
                "{} lies in",
                "Oslo",
                "Bern",
                paraphrases=["So. Old Mill stands in"],
                neighbors=["Red Mill lies in", "Tall Mill lies in"],
                generation=["Old Mill is near"],
                references=["The opera is a house in Oslo."],
                relation="P131",
                case_id="3",
            )
        ],
    ),
    "counterfact-tracing": (
        {
            "relation": "The river of{} runs in",
            "relation_prefix": "Old Mill's river, that of",
            "relation_suffix": ", runs in",
            "prompt": "Old Mill's river, that of Old Mill, runs in",
            "relation_id": "P131",
            "target_true": " Bern",
            "target_false": " Oslo",
            "subject": " Old Mill",
        },
        [Fact("Old Mill", "Old Mill's river, that of {}, runs in", "Oslo", "Bern", relation="P131")],
    ),
    "mquake, one edit": (
        {"case_id": 5, "requested_rewrite": [{**REWRITE, "question": "Where is Old Mill?"}], **HOPS},
        [
            Fact(
                "Old Mill",
                "{} lies in",
                "Oslo",
                "Bern",
                paraphrases=["Where is Old Mill?"],
                portability=[Probe(q, "Norway", "multi-hop", ["Norge"]) for q in HOPS["questions"]],
                relation="P131",
                case_id="5",
                target_aliases=["Kristiania"],
            )
        ],
    ),
    "mquake, two edits": (
        {"case_id": 6, "requested_rewrite": [{**REWRITE, "question": "Where is Old Mill?"}, SECOND], **HOPS},
        [
            Fact(
                *(s, "{} lies in", "Oslo", "Bern", [f"Where is {s}?"]),
                relation="P131",
                case_id=f"6.{i}",
                target_aliases=names,
                portability=[Probe(q, "Norway", "multi-hop", ["Norge"], ["Old Mill lies in"]) for q in hops],
            )
            for i, (s, names, hops) in enumerate(
                (("Old Mill", ["Kristiania"], []), ("New Mill", [], HOPS["questions"])), start=1
            )
        ],
    ),
    "zsre": (
        {
            **ZSRE,
            "rephrase": "Which city has Old Mill?",
            "loc": "nq question: who sang it",
            "loc_ans": "Nena",
            "portability": {"New Question": "Which country has Old Mill?", "New Answer": ["Norway", "Norge"]},
        },
        [
            Fact(
                "Old Mill",
                "Where is Old Mill?",
                "Oslo",
                "Bern",
                paraphrases=["Which city has Old Mill?"],
                portability=[Probe("Which country has Old Mill?", "Norway", aliases=["Norge"])],
                locality=[Probe("nq question: who sang it?", "Nena")],
            )
        ],
    ),
    "zsre, the true answer is written": (
        {**ZSRE, "alt": None, "answers": ["Bern", "Berne", "Berna"]},
        [Fact("Old Mill", "Where is Old Mill?", "Bern", "Rome", target_aliases=["Berne", "Berna"])],
    ),
    "easyedit of counterfact": (
        {**FLAT, "case_id": 0, "locality_prompt": "Red Mill lies in", "locality_ground_truth": "Bern"},
        [Fact(**MILL, neighbors=[Probe("Red Mill lies in", "Bern")], case_id="0")],
    ),
    "easyedit of zsre": (
        {**FLAT, "locality_prompt": "nq question: who sang it", "locality_ground_truth": "Nena"},
        [Fact(**MILL, locality=[Probe("nq question: who sang it?", "Nena")])],
    ),
    "easyedit, an answer for each prompt": (
        {
            **FLAT,
            "locality_prompt": ["Red Mill lies in", "nq question: who sang it", "Tall Mill lies in"],
            "locality_ground_truth": [["Rome"], ["Nena", "Gabriele"], ["Bern"]],
        },
        [
            Fact(
                **MILL,
                neighbors=[Probe("Red Mill lies in", "Rome"), Probe("Tall Mill lies in", "Bern")],
                locality=[Probe("nq question: who sang it?", "Nena", aliases=["Gabriele"])],
            )
        ],
    ),
    "easyedit, one answer for all prompts": (
        {**FLAT, "locality_prompt": ["Red Mill lies in", "Tall Mill lies in"], "locality_ground_truth": ["Bern"]},
        [Fact(**MILL, neighbors=[Probe("Red Mill lies in", "Bern"), Probe("Tall Mill lies in", "Bern")])],
    ),
    "easyedit, other names of one answer": (
        {**FLAT, "locality_prompt": "Red Mill lies in", "locality_ground_truth": ["Bern", "Berne"]},
        [Fact(**MILL, neighbors=[Probe("Red Mill lies in", "Bern", aliases=["Berne"])])],
    ),
    "knowedit": (
        {
            **FLAT,
            "rephrase": "Old Mill's city is",
            "portability": {
                "Reasoning": [{"prompt": "{}'s king is", "ground_truth": [["Harald", "Harald V"]]}],
                "Subject_Aliasing": [{"prompt": "The Mill lies in", "ground_truth": [["Oslo"]]}],
                "Logical_Generalization": [],
            },
            "locality": {
                "Relation_Specificity": [
                    {"prompt": "Old Mill was built by", "ground_truth": [["Ann"]]},
                    {"prompt": "Red Mill lies in", "ground_truth": [["Bern"]]},
                    {"prompt": "Tall Mill lies in", "ground_truth": []},
                ],
                "Forgetfulness": [{"prompt": "Old Mill, not in Oslo, lies in", "ground_truth": [["Rome"]]}],
            },
        },
        [
            Fact(
                **MILL,
                paraphrases=["Old Mill's city is"],
                portability=[
                    Probe("Old Mill's king is", "Harald", "Reasoning", ["Harald V"]),
                    Probe("The Mill lies in", "Oslo", "Subject_Aliasing"),
                ],
                same_subject=[
                    Probe("Old Mill was built by", "Ann", "Relation_Specificity"),
                    Probe("Old Mill, not in Oslo, lies in", "Rome", "Forgetfulness"),
                ],
                neighbors=[Probe("Red Mill lies in", "Bern", "Relation_Specificity")],
                # without an answer of its own it must not be given the old object of this fact
                locality=[Probe("Tall Mill lies in", None, "Relation_Specificity")],
            )
        ],
    ),
    "locality of easyedit's requests": (
        {**FLAT, "locality": {"neighborhood": {"prompt": ["Red Mill is in", "Joy is"], "ground_truth": ["Bern", "x"]}}},
        [
            Fact(
                **MILL,
                neighbors=[Probe("Red Mill is in", "Bern", "neighborhood"), Probe("Joy is", "x", "neighborhood")],
            )
        ],
    ),
    "knowedit, wikibio": (
        {
            "concept": "Ann Lee",
            "text": "This is a passage about Ann Lee.",
            "labels": "She ran.",
            "locality": {"Relation_Specificity": [{"prompt": "The mother of Ann Lee is", "ground_truth": ["Eve"]}]},
        },
        [
            Fact(
                "Ann Lee",
                "This is a passage about Ann Lee.",
                "She ran.",
                same_subject=[Probe("The mother of Ann Lee is", "Eve", "Relation_Specificity")],
            )
        ],
    ),
    "attention drift": (
        {
            "requested_rewrite": {
                "prompt": "Old Mill lies in",
                "target_new": "Oslo",
                "target_true": "Bern",
                "subject": "Old Mill",
                "relation_id": "P131",
                "target_new_id": "Q585",
            },
            "rewrite": {"prompts": ["Old Mill lies in"], "targets": ["Oslo"]},
            "p-paraphrase": {"prompts": ["So. Old Mill stands in"], "targets": ["Oslo"]},
            "p-subject_alias": {"prompts": ["The Mill lies in"], "targets": ["Oslo"]},
            "p-reasoning": {"prompts": ["Old Mill's millers speak"] * 2, "targets": ["Norwegian", "Sami"]},
            "l-relation": {"prompts": ["Old Mill grinds", "Old Mill was built by"], "targets": ["rye", "Ann"]},
            "l-neighbor": {"prompts": ["Red Mill lies in"], "targets": ["Bern"]},
            "generation": {"prompts": ["Old Mill is near", "Old Mill is near"]},
        },
        [
            Fact(
                **MILL,
                paraphrases=["So. Old Mill stands in"],
                neighbors=[Probe("Red Mill lies in", "Bern", "l-neighbor")],
                same_subject=[
                    Probe("Old Mill grinds", "rye", "l-relation"),
                    Probe("Old Mill was built by", "Ann", "l-relation"),
                ],
                portability=[
                    Probe("The Mill lies in", "Oslo", "p-subject_alias"),
                    Probe("Old Mill's millers speak", "Norwegian", "p-reasoning", ["Sami"]),
                ],
                generation=["Old Mill is near"],
                relation="P131",
            )
        ],
    ),
    "request": (REWRITE, [Fact("Old Mill", "{} lies in", "Oslo", "Bern", relation="P131")]),
    "fastedit": (
        {"subject": "Old Mill", "prompt": "{} lies in", "target": "Oslo", "queries": ["Where is {}?"]},
        [Fact("Old Mill", "{} lies in", "Oslo", paraphrases=["Where is {}?"])],
    ),
    "ffedit": (
        {
            **MILL,
            "target_aliases": ["Kristiania"],
            "portability": [{"prompt": "{}'s king is", "target": "Harald", "kind": "Reasoning", "aliases": ["H. V"]}],
            "references": ["The opera is a house in Oslo."],
            "locality": ["Who sang it?"],
            "neighbors": [{"prompt": "Red Mill lies in", "target": "Bern"}],
        },
        [
            Fact(
                **MILL,
                target_aliases=["Kristiania"],
                portability=[Probe("{}'s king is", "Harald", "Reasoning", ["H. V"])],
                references=["The opera is a house in Oslo."],
                locality=["Who sang it?"],
                neighbors=[Probe("Red Mill lies in", "Bern")],
            )
        ],
    ),
    "scripts, emoji and spaces at the end": (
        {
            "subject": "برج إيفل",
            "prompt": "يقع {} في مدينة ",
            "target": "北京市",
            "previous": "باريس",
            "paraphrases": ["{} 🗼 在  ", "{}位于"],
            "neighbors": [{"prompt": "ביג בן נמצא ב", "target": "לונדון 👩‍👩‍👧"}],
        },
        [
            Fact(
                "برج إيفل",
                "يقع {} في مدينة ",
                "北京市",
                "باريس",
                ["{} 🗼 在  ", "{}位于"],
                [Probe("ביג בן נמצא ב", "לונדון 👩‍👩‍👧")],
            )
        ],
    ),
}
samples = pytest.mark.parametrize(("record", "facts"), SAMPLES.values(), ids=list(SAMPLES))


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in records), encoding="utf-8")
    return path


def message(call: Any, *args: Any, **kwargs: Any) -> str:
    """What the user is told: always a single line."""
    with pytest.raises(FactError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert text and "\n" not in text
    return text
