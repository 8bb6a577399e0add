"""Every format, from every kind of source, into facts and back; and what cannot be used, with its reason."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ffedit.cli.options import fact_options
from ffedit.errors import FactError
from ffedit.facts import Fact, Probe
from ffedit.formats import FORMATS, parse
from ffedit.reading import read_facts, sift_facts
from ffedit.tables import find

SHARED = Path(__file__).parents[2] / "shared" / "data"
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

# name of the sample: its format, one record, and the facts that it is.
SAMPLES: dict[str, tuple[str, dict[str, Any], list[Fact]]] = {
    "counterfact": (
        "CounterFact",
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
        "counterfact-tracing",
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
        "MQuAKE",
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
        "MQuAKE",
        {"case_id": 6, "requested_rewrite": [{**REWRITE, "question": "Where is Old Mill?"}, SECOND], **HOPS},
        [
            Fact(
                *(s, "{} lies in", "Oslo", "Bern", [f"Where is {s}?"]),
                relation="P131",
                case_id=f"6.{i}",
                target_aliases=names,
            )
            for i, (s, names) in enumerate((("Old Mill", ["Kristiania"]), ("New Mill", [])), start=1)
        ],
    ),
    "zsre": (
        "zsRE",
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
                locality=[Probe("who sang it?", "Nena")],
            )
        ],
    ),
    "zsre, the true answer is written": (
        "zsRE",
        {**ZSRE, "alt": None, "answers": ["Bern", "Berne", "Berna"]},
        [Fact("Old Mill", "Where is Old Mill?", "Bern", "Rome", target_aliases=["Berne", "Berna"])],
    ),
    "easyedit of counterfact": (
        "EasyEdit",
        {**FLAT, "case_id": 0, "locality_prompt": "Red Mill lies in", "locality_ground_truth": "Bern"},
        [Fact(**MILL, neighbors=[Probe("Red Mill lies in", "Bern")], case_id="0")],
    ),
    "easyedit of zsre": (
        "EasyEdit",
        {**FLAT, "locality_prompt": "nq question: who sang it", "locality_ground_truth": "Nena"},
        [Fact(**MILL, locality=[Probe("who sang it?", "Nena")])],
    ),
    "easyedit, an answer for each prompt": (
        "EasyEdit",
        {
            **FLAT,
            "locality_prompt": ["Red Mill lies in", "nq question: who sang it", "Tall Mill lies in"],
            "locality_ground_truth": [["Rome"], ["Nena", "Gabriele"], ["Bern"]],
        },
        [
            Fact(
                **MILL,
                neighbors=[Probe("Red Mill lies in", "Rome"), Probe("Tall Mill lies in", "Bern")],
                locality=[Probe("who sang it?", "Nena", aliases=["Gabriele"])],
            )
        ],
    ),
    "easyedit, one answer for all prompts": (
        "EasyEdit",
        {**FLAT, "locality_prompt": ["Red Mill lies in", "Tall Mill lies in"], "locality_ground_truth": ["Bern"]},
        [Fact(**MILL, neighbors=[Probe("Red Mill lies in", "Bern"), Probe("Tall Mill lies in", "Bern")])],
    ),
    "easyedit, other names of one answer": (
        "EasyEdit",
        {**FLAT, "locality_prompt": "Red Mill lies in", "locality_ground_truth": ["Bern", "Berne"]},
        [Fact(**MILL, neighbors=[Probe("Red Mill lies in", "Bern", aliases=["Berne"])])],
    ),
    "knowedit": (
        "KnowEdit",
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
        "KnowEdit",
        {**FLAT, "locality": {"neighborhood": {"prompt": ["Red Mill is in", "Joy is"], "ground_truth": ["Bern", "x"]}}},
        [
            Fact(
                **MILL,
                neighbors=[Probe("Red Mill is in", "Bern", "neighborhood"), Probe("Joy is", "x", "neighborhood")],
            )
        ],
    ),
    "knowedit, wikibio": (
        "KnowEdit WikiBio",
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
    "request": ("ROME/MEMIT request", REWRITE, [Fact("Old Mill", "{} lies in", "Oslo", "Bern", relation="P131")]),
    "fastedit": (
        "FastEdit",
        {"subject": "Old Mill", "prompt": "{} lies in", "target": "Oslo", "queries": ["Where is {}?"]},
        [Fact("Old Mill", "{} lies in", "Oslo", paraphrases=["Where is {}?"])],
    ),
    "ffedit": (
        "ffedit",
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
        "ffedit",
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
samples = pytest.mark.parametrize(("form", "record", "facts"), SAMPLES.values(), ids=list(SAMPLES))


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in records), encoding="utf-8")
    return path


def message(call: Any, *args: Any, **kwargs: Any) -> str:
    """What the user is told: always a single line."""
    with pytest.raises(FactError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def datasets() -> Any:
    """The package `datasets`, silent."""
    found = pytest.importorskip("datasets", reason="tables are read with the package datasets, which is not installed")
    found.disable_progress_bars()
    return found


# Formats ------------------------------------------------------------------------------------------


@samples
def test_a_file_becomes_facts_and_facts_a_file(
    form: str, record: dict[str, Any], facts: list[Fact], tmp_path: Path
) -> None:
    assert next(row.name for row in FORMATS if row.fits(record)) == form
    assert read_facts(write(tmp_path / "theirs.jsonl", record)) == facts
    assert read_facts(write(tmp_path / "ours.jsonl", *(fact.to_dict() for fact in facts))) == facts


def test_every_format_has_a_sample() -> None:
    assert {form for form, _, _ in SAMPLES.values()} == {row.name for row in FORMATS} - {"known_1000"}


def test_what_a_fact_cannot_hold_is_noted(tmp_path: Path) -> None:
    many = SAMPLES["mquake, two edits"][1]
    other = {
        **many,
        "case_id": 7,
        "requested_rewrite": [{**r, "subject": r["subject"] + "s"} for r in (REWRITE, SECOND)],
    }
    found = sift_facts(write(tmp_path / "f.jsonl", many, {**FLAT, "subject": "Red Mill"}, other))
    note = "multi-hop questions that need 2 edits at once were left out"
    assert found.notes == ((1, note), (3, note)) and found.left_out == ((2, found.left_out[0][1]),)
    assert found.noted() == [f"{found.source}: {note} (2 records)"]
    probes = {
        "locality": {"Forgetfulness": [{"prompt": "Old Mill, not in Oslo, lies in", "ground_truth": "Bern"}]},
        "portability": {"Reasoning": [{"prompt": "{}'s king is", "ground_truth": []}]},
    }
    parsed = parse({**FLAT, **probes})
    assert parsed.facts == (Fact(**MILL),)
    assert [note.split()[0] for note in parsed.notes] == ["Forgetfulness", "portability"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"requested_rewrite": []}, "requested_rewrite is empty"),
        ({"requested_rewrite": ["x"]}, "an item of requested_rewrite must be an object, found 'x'"),
        ({"requested_rewrite": [REWRITE], "questions": ["x is"]}, "new_answer is missing"),
        ({"requested_rewrite": [{"prompt": "{} is", "subject": "x"}]}, "target_new is missing"),
        ({**FLAT, "portability": {"Reasoning": [{"prompt": 5, "ground_truth": "x"}]}}, "must be text, found 5 (int)"),
        ({**FLAT, "portability": ["x"]}, "portability must be an object"),
        ({**FLAT, "locality": {"n": {"prompt": ["a", "b"], "ground_truth": ["c"]}}}, "n has 2 prompts and 1 answers"),
        (
            {**FLAT, "locality_prompt": ["a", "b", "c"], "locality_ground_truth": ["x", "y"]},
            "locality_ground_truth has 2 answers; expected 1, or 3 as locality_prompt",
        ),
        ({**FLAT, "locality_prompt": "nq question: ", "target_new": "Bern"}, "target and previous are both 'Bern'"),
        ({**SAMPLES["counterfact-tracing"][1], "subject": " "}, "subject is empty"),
        ({**ZSRE, "portability": {"New Question": "x"}}, "New Answer is missing"),
    ],
)
def test_a_bad_record_is_one_clear_line(record: Any, expected: str) -> None:
    assert expected in message(parse, record)


# Sifting ------------------------------------------------------------------------------------------


def test_each_record_that_cannot_be_used_is_listed_with_its_reason(tmp_path: Path) -> None:
    records = [
        {**MILL, "case_id": 1},
        {"x": 1},
        {**MILL, "subject": "Red Mill", "prompt": "{} lies in", "case_id": 1},
        {**MILL, "target": "Rome", "case_id": 2},
        {**MILL, "target": "Bern"},
        {**MILL, "subject": "Tall Mill", "prompt": "{} lies in"},
    ]
    path = write(tmp_path / "f.jsonl", *records)
    found = sift_facts(path)
    assert (found.records, found.source) == (6, str(path))
    assert [fact.subject for fact in found.facts] == ["Old Mill", "Tall Mill"]
    reasons = dict(found.left_out)
    assert list(reasons) == [2, 3, 4, 5]
    assert "unknown shape" in reasons[2]
    assert reasons[3] == "case_id '1' is that of record 1, another fact; give each its own"
    assert reasons[4] == "'Old Mill lies in' has target 'Rome' here and 'Oslo' in record 1; keep one"
    assert "target and previous are both 'Bern'" in reasons[5]
    assert message(read_facts, path).endswith("(4 records of 6 cannot be used)")


def test_facts_that_are_edited_one_by_one_may_disagree_and_repeat(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", MILL, {**MILL, "target": "Rome"}, MILL)
    assert [f.target for f in sift_facts(path, together=False).facts] == ["Oslo", "Rome", "Oslo"]
    assert [f.target for f in sift_facts(path).facts] == ["Oslo"]


def test_a_source_of_nothing_usable_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", {"x": 1}, {"y": 1})
    assert message(sift_facts, path) == message(read_facts, path)
    assert message(sift_facts, write(tmp_path / "none.json", [])).endswith("JSON lines")


@pytest.mark.parametrize("quiet", [True, False])
def test_the_command_line_shows_the_notes(tmp_path: Path, quiet: bool) -> None:
    @click.command()
    @fact_options
    @click.option("--quiet", is_flag=True)
    def count(facts: list[Fact], quiet: bool) -> None:
        click.echo(len(facts))

    path = write(tmp_path / "f.json", SAMPLES["mquake, two edits"][1])
    result = CliRunner().invoke(count, [str(path)] + ["--quiet"] * quiet)
    assert result.stdout == "2\n"
    assert ("multi-hop questions that need 2 edits" in result.stderr) is not quiet


# Tables -------------------------------------------------------------------------------------------


@samples
@pytest.mark.parametrize("kind", ["parquet", "saved", "arrow", "folder"])
def test_a_table_reads_as_the_file_does(
    datasets: Any, kind: str, form: str, record: dict[str, Any], facts: list[Fact], tmp_path: Path
) -> None:
    table = datasets.Dataset.from_list([record])
    (folder := tmp_path / "table").mkdir()
    if kind in ("saved", "arrow"):
        table.save_to_disk(folder)
        place = folder if kind == "saved" else next(folder.glob("*.arrow"))
    else:
        place = folder if kind == "folder" else folder / "facts [1].parquet"
        table.to_parquet(folder / "train-00000-of-00001.parquet" if kind == "folder" else place)
    assert read_facts(place) == facts


def test_what_a_row_does_not_have_is_no_field(datasets: Any, tmp_path: Path) -> None:
    short = {"subject": "Red Mill", "prompt": "{} lies in", "target": "Oslo"}
    rows = [SAMPLES["ffedit"][1], short]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "facts.parquet")
    assert read_facts(tmp_path / "facts.parquet") == [*SAMPLES["ffedit"][2], Fact(**short)]


def test_a_split_is_named_where_there_are_several(datasets: Any, tmp_path: Path) -> None:
    rows = {name: datasets.Dataset.from_list([{**MILL, "case_id": name}]) for name in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "both")
    for name in rows:
        assert read_facts(f"{tmp_path / 'both'}:{name}")[0].case_id == name
    for asked in ("both", "both:dev"):
        path = str(tmp_path / asked)
        assert message(read_facts, path) == f"{path}: the splits are train, test; add one behind a colon"


def test_a_table_that_cannot_be_read(datasets: Any, tmp_path: Path) -> None:
    (bad := tmp_path / "bad.parquet").write_text("x")
    assert message(read_facts, bad).startswith(f"{bad} is no table that can be read: ")
    datasets.Dataset.from_list([MILL]).select([]).to_parquet(tmp_path / "none.parquet")
    assert message(read_facts, tmp_path / "none.parquet").endswith("holds no facts; expected at least one record")
    missing = tmp_path / "missing.parquet"
    assert message(read_facts, missing).startswith(f"no file {missing}")


def test_without_the_package_a_table_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (path := tmp_path / "facts.parquet").write_bytes(b"PAR1")
    assert message(read_facts, path) == f"{path}: to read it, pip install 'ffedit[datasets]'"
    assert read_facts(write(tmp_path / "facts.json", MILL)) == [Fact(**MILL)]


# The hub ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("NeelNanda/counterfact-tracing", ("NeelNanda/counterfact-tracing", None, None)),
        ("azhx/counterfact:train", ("azhx/counterfact", None, None)),
        ("owner/name#en:train", ("owner/name", "en", None)),
        ("owner/name.v2#en", ("owner/name.v2", "en", None)),
        ("zjunlp/KnowEdit/benchmark/some.json", ("zjunlp/KnowEdit", None, "benchmark/some.json")),
    ],
)
def test_a_name_of_the_hub_is_asked_for_without_remote_code(
    name: str, asked: tuple[Any, ...], empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load_dataset(place: str, configuration: str | None, data_files: str | None) -> Any:
        calls.append((place, configuration, data_files))
        return {"train": [{**MILL, "relation": None}]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_facts(name) == [Fact(**MILL)]
    assert calls == [asked]


def test_a_hub_that_does_not_answer_is_one_line(
    empty: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load_dataset(*asked: Any, **options: Any) -> Any:
        logging.getLogger("huggingface_hub.utils").error("Retrying in 1s")
        raise ConnectionError("Couldn't reach it\non the Hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    level = logging.getLogger("huggingface_hub").level
    assert message(read_facts, "owner/name") == (
        "owner/name: no such path, and not to be had as a data set of the hub (Couldn't reach it on the Hub); "
        "download a file of it and give that"
    )
    assert logging.getLogger("huggingface_hub").level == level and not caplog.records


def test_a_path_that_exists_always_wins(empty: Path) -> None:
    (empty / "azhx").mkdir()
    assert read_facts(str(write(empty / "azhx" / "counterfact", MILL).relative_to(empty))) == [Fact(**MILL)]
    (empty / "facts").mkdir()
    odd = write(empty / "facts:train", MILL)
    assert read_facts(odd.name) == [Fact(**MILL)]


@pytest.mark.parametrize(
    "name",
    ["facts", "facts.json", "edits/facts.json", "here/a/facts.json", "./a/b", "../a/b", "/a/b", "-", "", "a b/c"],
)
def test_a_missing_file_is_not_looked_for_on_the_hub(name: str, empty: Path) -> None:
    (empty / "here").mkdir()
    assert find(name) is None


# Published sets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "probes"),
    [("counterfact_easyedit_1000.json", "neighbors"), ("zsre_300.json", "locality")],
)
def test_the_published_sets_lose_nothing(name: str, probes: str) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"{SHARED / name} is not here")
    found = sift_facts(SHARED / name)
    assert len(found.facts) == found.records and not found.left_out and not found.notes
    assert all(getattr(fact, probes) for fact in found.facts)
