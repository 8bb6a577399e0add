"""A fact's `keep` and `also`: how they are read and kept, and each contradiction in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import records

from ffedit import EditError, FactError
from ffedit.facts.fact import Fact, Probe, as_protected, check_facts
from ffedit.facts.reading import read_facts, read_protected

MILL = {**records.MILL, "prompt": "{} lies in"}
KEEP = ["{} was built in", {"prompt": "The owner of {} is", "target": "Ann", "aliases": ["Anne"]}, "Red Mill lies in"]
ALSO = ["You can see {} in", "Where is Old Mill? In"]


def test_keep_and_also_are_read_from_a_file_and_written_back_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(json.dumps({**MILL, "keep": KEEP, "also": ALSO}))
    (fact,) = read_facts(tmp_path / "facts.json")
    assert [probe.prompt for probe in fact.probes("keep")] == [
        "Old Mill was built in",
        "The owner of Old Mill is",
        "Red Mill lies in",
    ]
    assert fact.keep[1] == Probe("The owner of {} is", "Ann", aliases=("Anne",))
    texts = [(text, text[slice(*span)]) for text, span in fact.statements]
    assert texts == [
        ("Old Mill lies in", "Old Mill"),
        ("You can see Old Mill in", "Old Mill"),
        ("Where is Old Mill? In", "Old Mill"),
    ]
    assert (fact.to_dict()["keep"], fact.to_dict()["also"]) == (KEEP, ALSO)
    assert Fact.from_dict(fact.to_dict()) == fact and "keep" not in Fact(**MILL).to_dict()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"keep": ["old mill  LIES in"]}, "keep 'old mill  LIES in' is also in prompt, whose answer should change"),
        ({"keep": ["See {} in"], "also": ["See Old Mill in"]}, "is also in also, whose answer should change"),
        ({"keep": ["See {} in"], "paraphrases": ["See {} in"]}, "is also in paraphrases, whose answer should ch"),
        ({"keep": ["{} is"], "portability": [{"prompt": "{} is", "target": "x"}]}, "is also in portability, whose"),
        (
            {"keep": ["{} is"], "same_subject": ["{} is"]},
            "same_subject, so the edit would optimise what it is measured by",
        ),
        ({"keep": ["Joy is"], "neighbors": ["Joy is"]}, "neighbors, so the edit would optimise what it is measured by"),
        ({"keep": ["Joy is"], "locality": ["Joy is"]}, "locality, so the edit would optimise what it is measured by"),
        ({"also": ["See {} in"], "paraphrases": ["See {} in"]}, "also 'See Old Mill in' is also in paraphrases, so"),
        ({"also": ["{} lies in"]}, "also 'Old Mill lies in' is also in prompt"),
        ({"also": ["It lies in"]}, "also 'It lies in' has neither {} nor the subject 'Old Mill'"),
        ({"also": "See {} in"}, "also must be a list"),
        ({"keep": "{} is"}, "keep must be a list"),
    ],
)
def test_what_contradicts_the_fact_or_is_no_prompt_is_one_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(FactError) as caught:
        Fact(**MILL, **changes)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_facts_that_are_written_together_agree_on_what_is_kept_and_said() -> None:
    first, other = Fact(**MILL, keep=["Red Mill lies in"]), Fact("Red Mill", "{} lies in", "Rome")
    check_facts([first, Fact("Red Mill", "{} stands in", "Rome")])
    with pytest.raises(
        EditError, match="'Red Mill lies in' is a prompt to keep and a fact with target 'Rome'; leave one"
    ):
        check_facts([first, other])
    also = Fact("Red Mill", "{} stands in", "Bern", also=["{} lies in"])
    with pytest.raises(EditError, match="the objects 'Rome' and 'Bern'"):
        check_facts([other, also])


@pytest.mark.parametrize("content", ["\ufeffTokyo Tower\n\n Big Ben \r\nTokyo Tower", '["Tokyo Tower", "Big Ben"]'])
def test_names_and_texts_to_protect_are_lines_or_a_list(tmp_path: Path, content: str) -> None:
    (tmp_path / "names").write_text(content, newline="")
    assert read_protected(tmp_path / "names") == ("Tokyo Tower", "Big Ben")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        (b"", "holds nothing to protect; expected names and texts, one a line or as a JSON list"),
        (b"[]", "holds nothing to protect"),
        (b'["Big Ben"', "cannot be read"),
        (b'[{"name": "Big Ben"}]', "a name or text in .* must be text"),
        (b'["Big Ben", ""]', "is empty"),
        (b"\xff\xfe\xfd", "cannot be read"),
        (b"Big\x00Ben", "control character"),
    ],
)
def test_a_file_that_protects_nothing_is_one_line(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / "names").write_bytes(content)
    with pytest.raises(FactError, match=told) as caught:
        read_protected(tmp_path / "names")
    assert "\n" not in str(caught.value)


def test_a_single_text_is_no_list_of_names() -> None:
    with pytest.raises(FactError, match="protect must be a list, found 'Big Ben'"):
        as_protected("protect", "Big Ben")
