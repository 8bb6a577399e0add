"""The token at which a key is read: by name, by number, by a word of the subject."""

from __future__ import annotations

import re

import pytest

from ffedit import EditError, FactError, KeyConfig
from ffedit.editor.config import EditConfig
from ffedit.editor.methods import set_numbers
from ffedit.facts.fact_token import check_word, index_of

# As a model cuts it: "E", "iffel", " Tower".
TOWER = ("Eiffel Tower", (1, 6, 12))


@pytest.mark.parametrize(
    ("token", "index"),
    [
        *(("subject_last", 2), ("subject_first", 0), (0, 0), (2, 2), (-1, 2), (-3, 0), ("1", 1), ("-2", 1), ("+1", 1)),
        *(("Eiffel", 1), ("Tower", 2), ("Eiffel Tower", 2)),
    ],
)
def test_a_token_is_found_by_name_number_or_word(token: str | int, index: int) -> None:
    assert index_of(token, *TOWER) == index


def test_a_word_that_stands_twice_is_the_first_and_one_without_spaces_has_its_token() -> None:
    assert index_of("New", "New York, New York", (3, 8, 9, 13, 18)) == 0
    assert index_of("東京", "東京タワー", (1, 2, 5)) == 1
    assert index_of("York", "New York", (3, 7)) == 1, "a tokenizer may drop the last characters"


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (3, "fact token 3 was asked for, but the subject 'Eiffel Tower' has 3 tokens; a number from 0 to 2"),
        ("-4", "from -3 to -1, was expected"),
        ("Paris", "'Paris' is not a word of the subject 'Eiffel Tower'; subject_last, subject_first, last, the number"),
        ("iffel", "'iffel' is not a word of the subject"),
        ("tower", "'tower' is not a word of the subject"),
    ],
)
def test_a_token_that_is_not_there_is_one_line(token: str | int, told: str) -> None:
    with pytest.raises(FactError, match=re.escape(told)) as caught:
        index_of(token, *TOWER)
    assert "\n" not in str(caught.value)


def test_a_word_is_checked_without_a_tokenizer_and_a_number_is_not() -> None:
    for token in ("Tower", "subject_first", "last", 99, "-99"):
        check_word(token, "Eiffel Tower")
    with pytest.raises(FactError, match="not a word of the subject"):
        check_word("Rome", "Eiffel Tower")


def test_a_configuration_keeps_it_as_text() -> None:
    assert KeyConfig(fact_token=-2) == KeyConfig(fact_token="-2") == KeyConfig(fact_token=" -2 ")
    assert KeyConfig(fact_token=-2).fact_token == "-2"
    for setting in ("key.fact_token=-2", 'key.fact_token="-2"'):
        assert set_numbers(EditConfig(), [setting]).key == KeyConfig(fact_token=-2)
    assert set_numbers(EditConfig(), ["key.fact_token=Eiffel"]).key == KeyConfig(fact_token="Eiffel")
    for wrong in (None, True, 1.0, "", "  ", ("last",)):
        with pytest.raises(EditError, match=r"key.fact_token is .*; subject_last, subject_first, last, the number"):
            KeyConfig(fact_token=wrong)  # type: ignore[arg-type]
