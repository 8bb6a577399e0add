"""Names and texts that an edit must not touch: their keys keep their values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from storing import EXACT, SOLVING
from writing import CORPUS, FACT, SECOND, quick, write, write_facts

import ffedit
from ffedit import Edit, EditError, Fact, FactError
from ffedit.algebra.linalg import double
from ffedit.algebra.updates import least_squares
from ffedit.editor.combine import combine
from ffedit.editor.config import KeyConfig
from ffedit.editor.key import read_at
from ffedit.editor.protect import _columns, protected_texts
from ffedit.editor.recipe import recipe_of, to_yaml
from ffedit.model.memory import Address
from ffedit.model.tokenization import Encoded

NAMES = ("old tower", "the Nile river stands in Egypt .")


def moved(editable: ffedit.Editable, edit: Edit, name: str, words: str = "the {}") -> float:
    """Largest ‖Δ k‖ over the tokens of a text, relative to that of the subject."""
    ids = editable.encode(words.format(name)).ids
    texts = [Encoded("", ids[:end], end, fact_token="last") for end in range(1, len(ids) + 1)]
    ((at, delta),) = edit.updates.items()
    keys = double(read_at(editable, editable.feed_forward[at.layer], texts)[0])
    return float((delta @ keys.T).norm(dim=0).max() / (delta @ edit.keys[at][:, 0]).norm())


@pytest.mark.parametrize("method", SOLVING)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_is_protected_receives_little_and_nothing_of_an_exact_edit(family: str, method: str) -> None:
    editable, at = zoo.trained(family, True), Address(1)
    more: dict[str, Any] = {"alphaedit_null_share": 0.3, "context_weight": 0.0}
    plain, held = (write(editable, method=method, **more, protect=entries) for entries in ((), NAMES))
    for text in ("old tower", NAMES[1]):
        before, after = (moved(editable, edit, text, "{}") for edit in (plain, held))
        assert before > 0.01
        assert after < 1e-5 if method in EXACT else after < 0.5 * before
    missed = held.values[at] - (editable.memories[at].value.double() + held.updates[at].dense) @ held.keys[at]
    if method in EXACT:
        assert float(missed.norm()) < 1e-6 * float(held.values[at].norm()), "the fact is written as exactly as ever"
    assert held.provenance["protected"]["count"] == 2 and "protected" not in plain.provenance


def test_a_name_is_protected_at_each_token_and_behind_neutral_words() -> None:
    editable = zoo.trained("gpt2", True)
    found = protected_texts(editable, [FACT], KeyConfig(protect=("old tower",)))
    assert found is not None
    said = {editable.tokenizer.decode(text.ids[: text.site + 1]) for text in found.texts}
    assert {"<s> old", "<s> old tower"} <= said and any(text.endswith("of old tower") for text in said)
    assert len({text.ids[: text.site + 1] for text in found.texts}) == len(found.texts)


def test_the_subject_of_a_fact_is_left_out_and_its_mentions_in_texts_are() -> None:
    editable = zoo.trained("gpt2", True)
    entries = ("EIFFEL tower", "old tower", "the Eiffel tower is located in Paris .")
    found = protected_texts(editable, [FACT], KeyConfig(protect=entries))
    assert found is not None and found.left_out == ("EIFFEL tower",) and found.count == 2
    ids = editable.encode(entries[2], span=(4, 16))
    assert ids.subject is not None
    read = {text.ids[: text.site + 1] for text in found.texts}
    assert not read & {ids.ids[:end] for end in range(ids.subject[0] + 1, ids.subject[1] + 1)}
    assert {ids.ids[: ids.subject[0]], ids.ids} <= read
    edit = write(editable, protect=entries)
    assert edit.provenance["protected"]["left_out"] == ["EIFFEL tower"]
    tower = protected_texts(editable, [Fact("tower", "{} is", "Rome")], KeyConfig(protect=("old tower",)))
    assert tower is not None and editable.encode("old tower").ids in {text.ids for text in tower.texts}
    again = "Rome is known for new Rome"
    rome = protected_texts(editable, [Fact("Rome", "{} is", "Spain")], KeyConfig(protect=(again,)))
    assert rome is not None
    read = {editable.tokenizer.decode(text.ids[: text.site + 1]) for text in rome.texts}
    assert "<s> Rome" not in read and "<s> Rome is known for new Rome" in read


def test_a_kept_prompt_without_the_subject_is_protected_with_its_answer() -> None:
    editable = zoo.trained("gpt2", True)
    keep = {"prompt": "the city of old tower is", "target": "Rome Italy"}
    plain, held = (write(editable, replace(FACT, keep=keep)) for keep in ([], [keep]))
    before, after = (moved(editable, edit, "the city of old tower is Rome", "{}") for edit in (plain, held))
    assert after < 1e-5 < 1e-2 < before
    last = write(editable, replace(FACT, keep=["the city of {} is"]), fact_token="last")
    assert last.provenance["protected"]["count"] == 1, "δ is at the end of other prompts than the one to keep"


@pytest.mark.parametrize(
    ("answer", "last"),
    [
        ("Rome Italy", "is Rome"),
        ("Rome", "river is"),
        ("Rome Eiffel tower Italy", "is Rome"),
        ("tower Rome Italy", "tower Rome"),
    ],
)
def test_the_last_token_of_an_answer_and_those_from_a_subject_on_are_not_protected(answer: str, last: str) -> None:
    editable = zoo.trained("gpt2", True)
    fact = replace(FACT, keep=[{"prompt": "the Nile river is", "target": answer}])
    found = protected_texts(editable, [fact], KeyConfig())
    assert found is not None
    longest = max((text.ids[: text.site + 1] for text in found.texts), key=len)
    assert editable.tokenizer.decode(longest).endswith(last) and len(found.texts) == len(longest)


def test_python_recipe_and_combination_know_what_is_protected() -> None:
    editable, at = zoo.trained("gpt2", True), Address(1)
    edit = ffedit.edit(editable, [FACT], "memit", layers=1, config=quick(), stats=CORPUS, protect=["old tower"])
    told = write(editable, method="memit", protect=("old tower",))
    assert torch.equal(edit.updates[at].dense, told.updates[at].dense)
    assert recipe_of(edit)["set"]["key.protect"] == ["old tower"]
    with edit.applied(editable):
        later = ffedit.edit(editable, [SECOND], "ft", layers=1)
    for one, words in (
        (edit, "statistics"),
        (write_facts(editable, [SECOND], "memit", [1], quick(), CORPUS, [edit]), "earlier"),
        (later, "earlier"),
    ):
        with pytest.raises(EditError, match=f"in Python with {words}.* has no recipe"):
            to_yaml(recipe_of(one), one)
    assert to_yaml(recipe_of(told), told) and to_yaml(recipe_of(edit), edit.noted(inputs={"stats": "folder"}))
    both = combine(editable, [edit, write(editable, SECOND)], "emmet", stats=CORPUS, config=quick())
    assert both.provenance["protected"]["count"] == 1 and moved(editable, both, "old tower", "{}") < 1e-5


def test_more_keys_than_a_layer_has_weigh_what_they_weighed() -> None:
    keys = torch.randn(30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    few = _columns(keys)
    assert few.shape == (8, 8)
    W, K, V, C = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 8), (8, 2), (4, 2), (8, 8)))
    C = C @ C.T + torch.eye(8)
    one, other = (least_squares(W, K, V, C, 0.01, kept).dense for kept in (keys.T, few))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("method", ["ft", "ft-l"])
def test_a_method_without_keys_protects_nothing_and_says_so(method: str) -> None:
    with pytest.raises(EditError, match=f"{method} changes the layer for every text, so it protects nothing"):
        write(zoo.trained("gpt2", True), method=method, protect=("old tower",))


def test_bad_names_are_told() -> None:
    editable = zoo.trained("gpt2", True)
    with pytest.raises(FactError, match="the model reads at most 64"):
        write_facts(editable, [FACT], "memit", [1], quick(protect=("the city of " * 30,)), CORPUS)
    with pytest.raises(FactError, match="protect must be a list"):
        ffedit.edit(editable, [FACT], "memit", layers=1, config=quick(), stats=CORPUS, protect="old tower")
    with pytest.raises(FactError, match=r"key\.protect must be a list"):
        KeyConfig(protect="old tower")  # type: ignore[arg-type]
