"""Other names in the subject's place: what they are, and that an edit moves them less."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import zoo
from storing import SOLVING, THIRD
from writing import CORPUS, FACT, SECOND, families, quick, write

import ffedit
from ffedit import Edit, Fact, algebra, editor
from ffedit.anatomy import Editable
from ffedit.blocks import Moment
from ffedit.editor import collect, read, word
from ffedit.editor.batch import read_all
from ffedit.editor.keys import read_namesakes
from ffedit.editor.surroundings import wordings
from ffedit.editor.wording import Wording
from ffedit.memory import Address

NUMBERS = {"contexts": 3, "phrasings": 6, "namesakes": 6}


def worded(editable: Editable, *facts: Fact, **numbers: int) -> list[Wording]:
    return word(editable, [[fact] for fact in facts], quick(**{**NUMBERS, **numbers}))


@families
def test_they_stand_where_the_subject_does_and_end_in_another_token(family: str, bos: bool) -> None:
    editable = zoo.trained(family, bos)
    (wording,) = worded(editable, FACT)
    starts = {(text.ids[: text.subject[1]], text.subject[0]) for text in wording.texts if text.subject}
    assert wording.namesakes and len({other.ids for other in wording.namesakes}) == len(wording.namesakes)
    cuts = set()
    for other in wording.namesakes:
        assert other.subject is not None and other.subject_last == len(other.ids) - 1
        cut, first = other.subject_last, other.subject[0]
        own = {ids[cut] for ids, start in starts if start == first and ids[:cut] == other.ids[:-1]}
        assert own and other.ids[-1] not in own
        cuts.add(cut - first)
    assert cuts == {0, 1}, "each token of the name gives way in turn"


def test_they_are_what_the_model_says_there() -> None:
    """The odds of each that is drawn are those of the model, once its own token is out."""
    editable = zoo.trained("gpt2", True)
    (wording,) = worded(editable, FACT, namesakes=400, contexts=0, phrasings=0)
    drawn = {other.ids for other in wording.namesakes}
    with torch.no_grad():
        for ids in {other.ids[:-1] for other in wording.namesakes}:
            odds = editable.model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)
            own = {text.ids[len(ids)] for text in wording.texts if text.ids[: len(ids)] == ids}
            likely = set((odds > 0.05 * (1 - odds[list(own)].sum())).nonzero()[:, 0].tolist()) - own
            assert {(*ids, token) for token in likely} <= drawn


def test_those_of_one_place_differ_and_are_words() -> None:
    editable = zoo.trained("gpt2", True)
    (few,), (all_,) = (worded(editable, FACT, namesakes=count, contexts=0, phrasings=0) for count in (6, 4000))
    places = {text.ids[: text.subject[1]] for text in few.texts if text.subject}
    assert len(few.namesakes) == 6 * len(places)
    last = {other.ids[-1] for other in all_.namesakes}
    special = set(editable.tokenizer.all_special_ids)
    assert special and last == set(range(editable.model.config.vocab_size)) - special, "the subject has two tokens"


def test_a_special_token_that_the_model_has_no_row_for_is_no_hindrance() -> None:
    editable = zoo.trained("gpt2", True)
    expected = worded(editable, FACT)[0].namesakes
    editable.tokenizer.add_special_tokens({"additional_special_tokens": ["<beyond>"]})
    assert max(editable.tokenizer.all_special_ids) >= editable.model.config.vocab_size
    assert worded(editable, FACT)[0].namesakes == expected


def test_nothing_precedes_a_name_at_the_very_beginning() -> None:
    """Without a token in front, nothing foretells the first one; one token alone has no namesake then."""
    editable = zoo.trained("gpt_neo", False)
    starts = {"contexts": 0, "phrasings": 0}
    (two,) = worded(editable, SECOND, **starts)
    assert {len(other.ids) for other in two.namesakes} == {2}
    (one,) = worded(editable, dataclasses.replace(SECOND, subject="Paris"), **starts)
    assert one.namesakes == ()
    assert read_namesakes(editable, editable.feed_forward[0], one).shape == (0, editable.memories[0].d_ff)


def test_none_is_edited_together_with_it() -> None:
    editable, place = zoo.trained("gpt2", True), 1
    (alone,) = worded(editable, FACT, namesakes=100)
    found = {other.ids[slice(*other.subject)]: other for other in alone.namesakes if other.subject}
    name = next(ids for ids in found if len(ids) == 2)
    subject = editable.tokenizer.decode(name).strip()
    together = worded(editable, FACT, dataclasses.replace(FACT, subject=subject), namesakes=100)
    assert together[0] == alone and name in together[1].names
    left = [ids for ids in (one.ids[slice(*one.subject)] for one in alone.namesakes if one.subject) if ids != name]
    assert len(left) < len(alone.namesakes)
    feed_forward = editable.feed_forward[place]
    keys = read_namesakes(editable, feed_forward, alone, together[1].names)
    assert len(keys) == len([ids for ids in left if ids not in together[1].names])
    weight, share = 0.25, 0.5
    _, own = read_all(editable, feed_forward, together, weight, share)
    parts = [read(editable, feed_forward, one) for one in together]
    expected: Moment = torch.zeros(keys.shape[1], keys.shape[1], dtype=torch.float64)
    for one, part, names in zip(together, parts, (together[1].names, together[0].names), strict=True):
        others = read_namesakes(editable, feed_forward, one, names)
        expected = part.steadied(expected, weight, others, share)
    torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-9)


def test_none_is_drawn_where_nothing_counts_it() -> None:
    editable = zoo.trained("gpt2", True)
    assert worded(editable, FACT)[0].namesakes
    assert not worded(editable, FACT, namesakes=0)[0].namesakes
    (plain,) = word(editable, [[FACT]], quick(**NUMBERS, steady=0.0))
    assert not plain.namesakes


# What they count ----------------------------------------------------------------------------------

CAPPED = {**NUMBERS, "steady": 1.0, "null_share": 0.9}


def solved_again(editable: Editable, edit: Edit, method: str, keys: int, after: tuple[Edit, ...] = ()) -> torch.Tensor:
    """Δ of the lowest layer of `edit`, where the namesakes of all `keys` together count as ordinary text."""
    at, config = min(edit.updates), quick(**CAPPED)
    place, memory, moments = (
        editable.feed_forward[at.layer],
        editable.memories[at],
        collect(editable, [editable.memories[at]], CORPUS)[at],
    )
    own: Moment = torch.zeros(memory.d_ff, memory.d_ff, dtype=torch.float64)
    new = word(editable, editor.by_subject(edit.facts), config)
    for some in (new, *(list(wordings(editable, [one]).values()) for one in after)):
        names = {name for wording in some for name in wording.names}
        for wording in some:
            others = read_namesakes(editable, place, wording, names)
            own = read(editable, place, wording).steadied(own, config.steady, others, 1 / (config.steady * keys))
    W, K, V = memory.value.double(), edit.keys[at], edit.values[at]
    kept = torch.cat([K[:, :0], *(one.keys[at] for one in after)], 1)
    assert isinstance(own, torch.Tensor)
    if method == "alphaedit":
        U = moments.unused(config.null_share)
        return algebra.null_space(W, K, V, U, config.null_give_up, kept, own).dense
    weight = config.give_up if method == "memit" else 0.0
    return algebra.least_squares(W, K, V, moments.C + own, weight, kept).dense


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).norm()) < 1e-4 * float(expected.norm())


@pytest.mark.parametrize("method", SOLVING)
def test_those_of_all_subjects_together_count_no_more_than_ordinary_text(method: str) -> None:
    """Whoever's they are: of an edit's own subjects, and of earlier edits'."""
    editable, at = zoo.trained("gpt2", True), Address(1)
    earlier = editor.write(editable, [FACT, SECOND], "emmet", [1], quick(**CAPPED), CORPUS)
    edit = editor.write(editable, [THIRD], method, [1], quick(**CAPPED), CORPUS, after=[earlier])
    same(edit.updates[at].dense, solved_again(editable, edit, method, 3, (earlier,)))


@pytest.mark.parametrize("layers", [[1], [0, 1]], ids=["one layer", "two layers"])
@pytest.mark.parametrize("method", ["emmet", "memit", "alphaedit"])
def test_nor_do_those_of_a_batch(method: str, layers: list[int]) -> None:
    editable = zoo.trained("gpt2", True)
    edit = editor.write(editable, [FACT, SECOND, THIRD], method, layers, quick(**CAPPED), CORPUS)
    same(edit.updates[Address(layers[0])].dense, solved_again(editable, edit, method, 3))


def test_nor_do_those_of_edits_that_are_solved_again_as_one() -> None:
    editable, config = zoo.trained("gpt2", True), quick(**CAPPED)
    edits = [editor.write(editable, some, "emmet", [1], config, CORPUS) for some in ([FACT, SECOND], [THIRD])]
    both = ffedit.combine(editable, edits, "emmet", CORPUS, config)
    same(both.updates[Address(1)].dense, solved_again(editable, both, "emmet", 3))


@pytest.mark.parametrize("method", ["rome", "emmet", "memit", "alphaedit"])
def test_an_edit_moves_them_less(method: str) -> None:
    editable = zoo.trained("llama", True)
    memory, stats = editable.memories[1], collect(editable, [editable.memories[1]], CORPUS)
    assert stats
    (wording,) = worded(editable, FACT)
    keys, moved = read_namesakes(editable, editable.feed_forward[1], wording).double(), []
    for namesakes in (0, 6):
        edit = write(editable, method=method, **{**NUMBERS, "namesakes": namesakes, "steady": 1.0, "null_share": 0.9})
        delta, k = edit.updates[memory.address].dense, edit.keys[memory.address][:, 0]
        moved.append(float((keys @ delta.T).norm(dim=1).mean() / (delta @ k).norm()))
    assert moved[1] < 0.7 * moved[0]
