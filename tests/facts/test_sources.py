"""Files of every kind, as other programs write them, and every way to spoil one."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from records import MILL, message

from ffedit.facts.fact import Fact
from ffedit.facts.reading import read_facts, sift_facts
from ffedit.facts.sources import stream_records
from ffedit.facts.synonyms import role_of

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "facts" / "cases"
FACT, SECOND = Fact(**MILL), Fact("Red, or so", 'He said "{}\nis', "Rome")
HEADER = ("subject", "prompt", "target", "previous")
CSV = 'Subject,Prompt,Target,Ground Truth\nOld Mill,Old Mill lies in,Oslo,Bern\n"Red, or so","He said ""{}\nis",Rome,\n'
YAML = """# by hand
- subject: Old Mill
  prompt: Old Mill lies in
  target: Oslo
  previous: Bern
- {subject: "Red, or so", prompt: "He said \\"{}\\nis", target: Rome, previous: ~}
"""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("f.csv", CSV),
        ("f.csv", "\ufeff\r\n" + CSV.replace("\n", "\r\n").replace("{}\r\n", "{}\n")),
        ("f.csv", CSV.replace("Red, or", "Red; or").replace(",", ";").replace("Red;", "Red,")),
        ("f.tsv", CSV.replace("Red, or", "Red; or").replace(",", "\t").replace("Red;", "Red,")),
        ("f.txt", CSV),
        ("-", CSV),
        ("f.yaml", YAML),
        ("f.yml", YAML.replace("- {", "---\n- {")),
        ("-", YAML.split("\n", 1)[1]),
        ("f.txt", json.dumps([FACT.to_dict(), SECOND.to_dict()])),
        ("f.json", json.dumps({"version": 1, "data": [FACT.to_dict(), SECOND.to_dict()]})),
        ("f.json", json.dumps({"7": FACT.to_dict(), "9": SECOND.to_dict()})),
        ("f.json", json.dumps({"rows": [{"row": FACT.to_dict()}, {"row": SECOND.to_dict()}], "features": []})),
        ("f.json", json.dumps({n: [getattr(f, n) for f in (FACT, SECOND)] for n in HEADER})),
        ("f.json", json.dumps({n: {i: getattr(f, n) for i, f in enumerate((FACT, SECOND))} for n in HEADER})),
    ],
)
def test_a_file_of_any_kind_reads_the_same(
    tmp_path: Path, name: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "-":
        monkeypatch.setattr("sys.stdin", io.StringIO(content, newline=""))
        assert read_facts("-") == [FACT, SECOND]
    else:
        (tmp_path / name).write_text(content, encoding="utf-8", newline="")
        assert read_facts(tmp_path / name) == [FACT, SECOND]


def test_plain_words_of_yaml_are_text(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(
        "- {subject: Norway, prompt: '{} is', target: no, previous: 1998, occurrence: 0}\n"
    )
    assert read_facts(tmp_path / "f.yaml") == [Fact("Norway", "{} is", "no", "1998")]


def test_a_cell_may_hold_a_list_or_nothing(tmp_path: Path) -> None:
    rows = ['A,{} is,x,"[""{} a"", ""b {}""]",NaN', "B,{} is,x,\"['c']\",", "C,{} is,x,[d,null"]
    header = "subject,prompt,target_new.str,paraphrases,previous"
    (tmp_path / "f.csv").write_text("\n".join([header, *rows]))
    found = read_facts(tmp_path / "f.csv")
    assert [fact.paraphrases for fact in found] == [("{} a", "b {}"), ("c",), ("[d",)]
    assert not any(fact.previous for fact in found)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("f.csv", 'subject, prompt, target\nA, "{} is ""in"", or, ""at""", "x"\n'),
        ("f.csv", 'subject;prompt;target\nA; "{} is ""in"", or, ""at"""; "x"\n'),
        ("f.csv", 'subject, "prompt", target\nA, "{} is ""in"", or, ""at""", x\n'),
        ("f.tsv", 'subject\tprompt\ttarget\nA\t "{} is ""in"", or, ""at"""\t "x"\n'),
    ],
)
def test_spaces_before_a_quote_are_not_in_the_cell(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert read_facts(tmp_path / name) == [Fact("A", '{} is "in", or, "at"', "x")]


def test_spaces_that_begin_a_cell_are_its_own_unless_the_header_has_them(tmp_path: Path) -> None:
    header, row = "relation_prefix,subject,relation_suffix,target", "The city of, A, is,x\n , , ,\n"
    for head, text in ((header, "The city of A is"), (header.replace(",", ", "), "The city ofAis")):
        (tmp_path / "f.csv").write_text(f"{head}\n{row}")
        assert [fact.text for fact in read_facts(tmp_path / "f.csv")] == [text]


def test_only_line_ends_end_a_row_of_utf_16(tmp_path: Path) -> None:
    for subject in ("A\u2028B", "A\x85B"):
        (tmp_path / "f.tsv").write_text(f"subject\tprompt\ttarget\r\n{subject}\t{{}} is\tx\r\n", encoding="utf-16")
        assert [fact.subject for fact in read_facts(tmp_path / "f.tsv")] == [subject]


def test_rows_that_do_not_fit_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("subject,prompt,target\nA,{} is, in short,x\nB,{} is,x\nC,{} is\n\n")
    found = sift_facts(tmp_path / "f.csv")
    assert [fact.subject for fact in found.facts] == ["B"] and found.records == 3
    assert dict(found.left_out)[1] == "line 2 has 4 cells and the header 3; put text that holds ',' between quotes"
    assert found.kinds == {1: "a row of more cells", 3: "no new object"}


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "f.csv",
            'subject,prompt\nA,"{} is\n',
            "f.csv, record 1: line 2: unexpected end of data; is a quote open?",
        ),
        ("f.csv", '"subject,prompt\n', "f.csv is not a table that can be read (line 1): unexpected end of data"),
        ("f.csv", "subject,prompt\n", "holds no facts"),
        (
            "f.csv",
            "A;{} is;x\n",
            "f.csv: its first row holds a fact; put a header above it, such as subject;prompt;target;previous",
        ),
        ("f.csv", b"PK\x03\x04", "f.csv is a workbook or a zip archive; save the sheet as CSV in UTF-8"),
        ("f.jsonl.gz", b"\x1f\x8b\x08", "f.jsonl.gz is compressed; unpack it: gunzip"),
        (
            "f.csv",
            b"subject,prompt\nA,caf\xe9\n",
            "f.csv is not UTF-8 text (byte 20); expected JSON, CSV or YAML, saved as UTF-8",
        ),
        ("f.csv", "subject,prompt\n".encode("utf-16") + b"x", "f.csv is not UTF-16 text (byte 32); expected"),
        ("f.txt", "subject,prompt,target\rA,{} is,x\r", "f.txt is not a table that can be read (line 1): new-line"),
        ("f.txt", f"{'a' * 140_000},b\n", "f.txt is not JSON (line 1, column 1)"),
        ("f.yaml", "- {a: [\n", "f.yaml is not YAML (line 2): "),
        ("f.yaml", "- &a {x: 1}\n- *a\n", "f.yaml is not YAML (line 2): aliases are not read"),
        ("f.yaml", "- !!python/object:os.system x\n", "f.yaml is not YAML (line 1): could not determine a constructor"),
        ("f.yaml", "", "holds no facts"),
        (
            "f.parquet",
            "version https://git-lfs.github.com/spec/v1\nsize 9\n",
            "is a pointer of Git LFS and not the data",
        ),
    ],
)
def test_a_spoiled_file_is_one_line(tmp_path: Path, name: str, content: str | bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert told in message(read_facts, tmp_path / name)


class Endless(io.RawIOBase):
    """Standard input that never ends, and counts the lines that are read."""

    def __init__(self, first: bytes, line: bytes) -> None:
        self.lines, self.first, self.line = 0, first, line

    def __iter__(self) -> Iterator[bytes]:
        yield self.first
        while True:
            self.lines += 1
            yield self.line


@pytest.mark.parametrize(
    ("first", "line"), [(b'{"subject": "a"}\n', b'{"subject": "b"}\n'), (b"subject,prompt\n", b"b,{} is\n")]
)
def test_lines_and_tables_are_streamed(first: bytes, line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Endless(first, line)
    monkeypatch.setattr("sys.stdin", source)
    records = stream_records("-")
    assert [next(records)["subject"] for _ in range(3)][-1] == "b" and source.lines < 10


def test_a_thousand_equal_records_are_one_fact(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text(f"{json.dumps(MILL)}\n" * 1000)
    found = sift_facts(tmp_path / "f.jsonl")
    assert found.facts == (FACT,) and found.records == 1000
    (note,) = found.noted()
    assert note.endswith("repeats an earlier record: both are one fact (999 records)")


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    for name, fact in (
        ("a", {**MILL, "case_id": 1}),
        ("b", {**MILL, "subject": "Mill", "prompt": "{} is", "case_id": 1}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps([fact, {**fact, "target": ""}]))
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    found = sift_facts(paths)
    assert [fact.case_id for fact in found.facts] == [f"{path}:1" for path in paths]
    assert [number for number, _ in found.left_out] == [f"{path}, record 2" for path in paths]
    assert message(read_facts, paths).startswith(
        f"{paths[0]}, record 2: target is empty; expected some text (2 records"
    )
    assert message(read_facts, []) == "no file of facts was given; expected at least one"


# The page on files -------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "your-file.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("kind", "block"), re.findall(r"```(json|yaml)\n(.*?)```", PAGE, re.DOTALL))
def test_every_shape_of_the_page_is_read(tmp_path: Path, kind: str, block: str) -> None:
    (tmp_path / f"f.{kind}").write_text(block, encoding="utf-8")
    found = sift_facts(tmp_path / f"f.{kind}", language="en" if '"en"' in block else None)
    assert found.facts and not found.left_out and not found.unread


def test_every_name_on_the_page_is_known() -> None:
    rows = re.findall(r"^\| `?(\w+)`? \| (`.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 10
    for role, text in rows:
        for name in re.findall(r"`([^`]+)`", text.partition(":")[0]):
            found = role_of(name.split("."))
            assert found is not None and found[0].split()[0] == ("answer" if role == "either" else role), name


# The cases of the field ---------------------------------------------------------------------------

READ = {
    "counterfact_flat.json": (2, ["id", "target_random", "cloze", "question", "answer_a", "answer_b"]),
    "requested_rewrite_strings.json": (2, ["rewrite", "time", "pre", "post"]),
    "zsre_alt.json": (2, ["cond", "pred"]),
    "some_bad_records.json": (1, []),
    "other_case_and_inflection.json": (5, []),
    "two_languages.json": (1, []),
    "questions_without_subject.jsonl": (2, []),
    "long_answers.json": (1, ["id"]),
    "table.csv": (2, ["topic"]),
    "original_and_new_object.jsonl": (2, ["category"]),
    "question_and_answer.json": (1, ["case_index", "qna_question"]),
    "subject_verb_object.json": (2, ["label", "verb", "neg"]),
    "own_form_and_more.json": (1, ["id", "source"]),
    "blanks_and_stops.json": (3, []),
}


@pytest.mark.parametrize("name", READ)
def test_files_as_people_have_them_are_read(name: str) -> None:
    found = sift_facts(CASES / name, language="en" if name == "two_languages.json" else None)
    count, unread = READ[name]
    assert len(found.facts) == count and set(found.unread) == set(unread)
    bad = {"nothing to change": 1, "a contradiction": 2, "no place for the subject": 1, "an empty target": 1}
    kinds = {row.kind: len(row.records) for row in found.by_kind}
    assert kinds == (bad if name == "some_bad_records.json" else {})


def test_every_reported_file_has_a_test() -> None:
    files = {path.name for path in CASES.iterdir()} - {"lfs_pointer.json"}
    assert files == set(READ) and "git lfs pull" in message(read_facts, CASES / "lfs_pointer.json")


def test_reported_files_read_to_their_facts(tmp_path: Path) -> None:
    def read(name: str, **more: Any) -> list[Fact]:
        return list(sift_facts(CASES / name, **more).facts)

    assert [(f.target, f.previous) for f in read("zsre_alt.json")][1] == ("the Green Valley", "Narnia")
    assert [(f.target, f.previous) for f in read("blanks_and_stops.json")] == [
        ("Spain", "Italy"),
        ("Spain", "Italy"),
        ("SPAIN", None),
    ]
    (zh,) = read("two_languages.json", language="zh")
    assert zh.subject == "莱茵瀑布" and {(p.kind, p.target) for p in zh.cross_lingual} == {("en", "Austria")}
    assert [f.target for f in read("some_bad_records.json", in_sequence=True)] == ["Mombasa", "Tamale"]
    assert all(f.paraphrases and f.neighbors and f.previous for f in read("counterfact_flat.json"))
    mapped = read("table.csv", fields={"target": "object", "prompt": "paraphrased_question"})
    assert mapped[0].prompt == "What is depicted by Blue Rider?" and mapped[0].target == "a horse"


# Published sets, where they lie beside the checkout ------------------------------------------------------


def published(name: str) -> Path:
    """Return the path of a set; skip the test where it is missing."""
    if not (path := ROOT.parent / "shared" / "data" / name).exists():
        pytest.skip(f"{path} is not here")
    return path


@pytest.mark.parametrize(
    ("name", "count", "probes"),
    [
        ("counterfact_easyedit_1000.json", 1000, "neighbors"),
        ("zsre_300.json", 300, "locality"),
        ("known_1000.json", 1208, None),  # 1,209 records, of which one asks the same as another; no new objects
    ],
)
def test_a_published_set_is_read_whole(name: str, count: int, probes: str | None) -> None:
    found = sift_facts(published(name), need_targets=probes is not None)
    assert len(found.facts) == count and not found.left_out
    assert all(fact.text[slice(*fact.span)] == fact.subject for fact in found.facts)
    if probes is not None:
        assert all(fact.target is not None and getattr(fact, probes) for fact in found.facts) and not found.notes
    assert [Fact.from_dict(json.loads(json.dumps(fact.to_dict()))) for fact in found.facts] == list(found.facts)


def test_the_set_of_same_subject_probes_is_read_but_for_what_contradicts_itself() -> None:
    sifted = sift_facts(published("same_subject_800.json"))
    assert (len(sifted.facts), len(sifted.left_out)) == (790, 10)  # five pairs give a prompt two targets
    counts = [sum(bool(getattr(f, n)) for f in sifted.facts) for n in ("same_subject", "portability", "neighbors")]
    assert counts == [183, 351, 334]
