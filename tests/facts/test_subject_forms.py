"""Subjects as they stand in real text."""

from __future__ import annotations

import pytest
from records import message

from ffedit.facts.fact import Fact
from ffedit.facts.formats import OTHER_FORM, parse
from ffedit.facts.mentions import find_mention, nearest


@pytest.mark.parametrize(
    ("subject", "text", "found"),
    [
        ("Lake Como", "lake COMO is", "lake COMO"),
        ("cafe Anna", "The Cafe\u0301 Anna is", "Cafe\u0301 Anna"),
        ("Стекло", "Из чего делают стекло? Для стекла —", "стекло"),  # the longest of two
        ("Пётр Великий", "столица Петра Великого", "Петра Великого"),
        ("Anna Virta", "Mikä on Anna Virran äidinkieli?", "Anna Virran"),
        ("Helsinki", "Helsingin väkiluku", "Helsingin"),
        ("İstanbul", "İSTANBUL'un nüfusu", "İSTANBUL"),
        ("ليلى حداد", "ما هي اللغة الأم لليلى حداد؟", "ليلى حداد"),  # without its particle
        ("תל אביב", "בתל אביב יש", "תל אביב"),
        ("ঢাকা", "ঢাকার জনসংখ্যা", "ঢাকা"),  # without its ending
        ("Rome", "rome and ROME are", "rome"),  # one form twice: the first
        ("Rome", "a romantic song", None),
        ("Rome", "Jerome sang", None),
        ("Peru", "The capital is", None),
        ("Virta", "Virran ja Virrat", None),  # two forms that are as long
        ("!", "? is", None),
        ("x" * 10_000, "y" * 10_000, None),
    ],
)
def test_the_one_longest_form_is_found(subject: str, text: str, found: str | None) -> None:
    span = find_mention(text, subject)
    assert (span and text[slice(*span)]) == found


def test_a_record_says_in_which_form_it_took_the_subject() -> None:
    read = parse({"subject": "Anna Virta", "src": "Mikä on Anna Virran äidinkieli?", "alt": "ruotsi"})
    assert read.facts == (Fact("Anna Virran", "Mikä on {} äidinkieli?", "ruotsi"),)
    assert read.notes == (OTHER_FORM,) and getattr(read.notes[0], "example", "") == "'Anna Virta' as 'Anna Virran'"
    particle = parse({"subject": "ליאור", "src": "מה גובהו של לליאור?", "alt": "x"})
    assert particle.facts[0].prompt == "מה גובהו של ל{}?" and not particle.notes, "the subject stands there as it is"


def test_the_error_shows_the_nearest_text() -> None:
    record = {"subject": "Eiffel Tower", "prompt": "The tall Eifel Towr is in", "target": "Rome"}
    assert "nor the subject 'Eiffel Tower' (nearest is 'Eifel Towr'); put {} where" in message(parse, record)
    assert nearest("The capital is", "Peru") is None


def test_a_subject_of_ten_thousand_letters_is_one_line() -> None:
    text = message(parse, {"subject": "word " * 2000, "prompt": "other " * 5000, "target": "Rome"})
    assert "nor the subject" in text and len(text) < 400
    assert parse({"subject": "word " * 2000, "prompt": "{} is in", "target": "Rome"}).facts
