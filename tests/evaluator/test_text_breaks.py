"""Text behind the new object: special and repeated tokens, where it ends, and what the verdict says of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import zoo
from shown import words
from speaking import speaking
from torch import Tensor, nn
from transformers import AddedToken

from ffedit import Edit, Fact, Report, evaluate
from ffedit.display.terminal.scores import before_after
from ffedit.evaluator import formulas
from ffedit.evaluator.generations import SAID_TOKENS, TEXT_TOKENS
from ffedit.evaluator.scores import FactScores, Scores
from ffedit.evaluator.verdict import breaks
from ffedit.inference import generation
from ffedit.model.editable import Editable

FACT = Fact("Eiffel tower", "the {} is located in", "Rome", "Paris", ["{} stands in", "the city of {} is"])


class Saying(Edit):
    """The model says the new object, and behind it one token again and again."""

    def __init__(self, target: int, token: int) -> None:
        super().__init__({}, {}, {}, (), {"target": target, "token": token})

    @contextmanager
    def applied(self, editable: Editable) -> Iterator[Editable]:
        goes_on = False

        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            nonlocal goes_on
            goes_on = args[0].shape[-1] == 1  # one token in each row

        def push(module: nn.Module, args: object, logits: Tensor) -> Tensor:
            logits = logits.clone()
            logits[..., self.provenance["token" if goes_on else "target"]] += 30
            return logits

        hooks = editable.embedding.register_forward_pre_hook(see), editable.unembedding.register_forward_hook(push)
        try:
            yield editable
        finally:
            for hook in hooks:
                hook.remove()


def report(token: str | None) -> Report:
    """Of an edit behind whose new object `token` follows; None: the end of the text."""
    editable = zoo.trained("gpt2")
    tokenizer: Any = editable.tokenizer
    end = int(tokenizer.eos_token_id)
    follows = end if token is None else int(tokenizer.convert_tokens_to_ids(token))
    return evaluate(editable, FACT, Saying(int(tokenizer.convert_tokens_to_ids("Rome")), follows))


def test_special_tokens_and_runs_that_occurred_before_are_degenerate() -> None:
    assert formulas.degenerate([1, 2, 3, 4, 5, 6], ()) == 0
    assert formulas.degenerate([1, 2, 3, 4, 1, 2, 3, 4], ()) == 1 / 8, "the last one completes four that were there"
    assert formulas.degenerate([1, 2, 3, 1, 2, 3, 5, 1, 2, 3], ()) == 0, "three in a row are ordinary"
    assert formulas.degenerate([7] * 40, ()) == 36 / 40
    assert formulas.degenerate([1, 9, 2, 9], {9}) == 0.5 and formulas.degenerate([9] * 5, {9}) == 1


def test_a_model_that_says_the_object_and_then_no_words_does_not_pass() -> None:
    special = zoo.trained("gpt2").tokenizer.unk_token
    for token, share in ((special, (TEXT_TOKENS - 1) / TEXT_TOKENS), (".", (TEXT_TOKENS - 5) / TEXT_TOKENS)):
        found = report(token)
        assert found.after is not None and found.facts_after is not None
        assert found.after.generation == 1, "it says the new object"
        assert found.after.degenerate == pytest.approx(share) and found.after.greedy_entropy < 2  # type: ignore[operator]
        assert found.before.degenerate is not None and found.before.degenerate < 0.6 * share
        verdict = found.verdict
        assert verdict.outcome == "took, but text breaks" and "degenerate" in verdict.damage and verdict.took == 1
        assert verdict.text.startswith("Done, but text breaks: the model now says “Rome”")
        assert f"{share:.0%} of the tokens it then says are special or repeated" in verdict.text
        assert ("special_tokens" in verdict.damage) == (token == special)
        assert found.before.special_tokens == 0
        assert found.after.special_tokens == (pytest.approx(share) if token == special else 0)
        row = next(line for line in words(before_after(found)).split("degenerate", 1)[1:])
        assert "!" in row.split("greedy_entropy")[0]
    assert report(special).facts_after[0].says == "Rome", "cut at the special token"  # type: ignore[index]
    assert report(".").facts_after[0].says == "Rome" + " ." * (SAID_TOKENS - 1)  # type: ignore[index]


def test_what_follows_the_end_is_no_text() -> None:
    found = report(None)
    assert found.after is not None and found.facts_after is not None
    assert found.after.degenerate == 0 and found.facts_after[0].says == "Rome" and found.after.generation == 1
    assert "degenerate" not in found.verdict.damage


def test_a_text_that_ends_at_once_is_not_measured() -> None:
    editable = zoo.trained("gpt2")
    end = int(editable.tokenizer.eos_token_id)  # type: ignore[arg-type]
    found = evaluate(editable, FACT, Saying(end, end))
    assert found.after is not None and found.after.degenerate is found.after.greedy_entropy is None
    assert found.facts_after is not None and found.facts_after[0].says == ""


def test_added_tokens_that_decoding_leaves_out_are_special() -> None:
    editable = speaking("gpt2")
    editable.tokenizer.add_tokens([AddedToken("<image>", special=True)])  # type: ignore[list-item]
    unmarked = ["<start_of_image>", "<|file_sep|>", "<table>", "snake_case", "    "]
    editable.tokenizer.add_tokens([AddedToken(name, special=False) for name in unmarked])  # type: ignore[arg-type]
    image, *others = editable.tokenizer.convert_tokens_to_ids(["<image>", *unmarked])
    assert image not in editable.tokenizer.all_special_ids and image in editable.special
    assert [other in editable.special for other in others] == [True, True, False, False, False], "two are no text"
    for token in (image, others[0]):
        ids = [*editable.encode("Rome").ids, token, *editable.encode("or").ids]
        assert generation.words(editable, ids) == "Rome"


# Before the edit, a twentieth of the text was repeated.
OLD = Scores(efficacy=0.0, generation=0.0, paraphrase=0.0, degenerate=0.05, special_tokens=0.0)


def measured(wordings: int, old: Scores = OLD, **after: float) -> Report:
    """Of a fact that took, with so many other wordings."""
    fact = replace(FACT, paraphrases=tuple(f"{{}} is {i}" for i in range(wordings)))
    new = Scores(**{**old.to_dict(), "efficacy": 1.0, "generation": 1.0, "paraphrase": 1.0, **after})
    return Report(old, new, (FactScores(fact, old, "Paris"),), (FactScores(fact, new, "Rome"),))


def test_one_loop_in_five_texts_is_noise_and_loops_in_all_are_not() -> None:
    assert measured(4, degenerate=0.05 + 0.9 / 5).verdict.outcome == "took"
    assert measured(4, degenerate=0.5).verdict.outcome == "took, but text breaks"
    assert measured(0, degenerate=0.9).verdict.outcome == "took", "one text says nothing of repetition"
    assert breaks("degenerate", 0.1, 0.25, 100) and not breaks("degenerate", 0.1, 0.19, 10_000), "many show less"
    assert not breaks("degenerate", 0.5, 0.85, 5), "it repeated itself before the edit"


def test_special_tokens_in_more_than_one_text_are_no_chance() -> None:
    assert measured(4, special_tokens=0.9 / 5).verdict.outcome == "took"
    assert list(measured(4, special_tokens=1.8 / 5).verdict.damage) == ["special_tokens"]
    assert measured(1, special_tokens=0.9 / 2).verdict.outcome == "took"
    assert measured(1, special_tokens=0.9).verdict.outcome == "took, but text breaks"
    alone = measured(0, special_tokens=0.9).verdict
    assert alone.outcome == "took, but text breaks"
    assert "but special tokens took the place of 90% of the text it then says." in alone.text
    assert breaks("special_tokens", 0, 0.06, 100) and not breaks("special_tokens", 0, 0.04, 100)


def test_text_that_ended_at_once_before_the_edit_breaks_where_it_repeats_after_it() -> None:
    ended = Scores(**{**OLD.to_dict(), "degenerate": None})
    assert measured(4, ended, degenerate=0.9).verdict.outcome == "took, but text breaks"
    assert measured(4, ended, degenerate=0.1).verdict.outcome == "took"


def test_an_edit_of_what_the_model_said_that_costs_it_wordings_is_no_success() -> None:
    known = Scores(**{**OLD.to_dict(), "efficacy": 1.0, "generation": 1.0, "paraphrase": 1.0})
    assert measured(4, known).verdict.outcome == "nothing to change"
    fallen = measured(4, known, paraphrase=0.25).verdict
    assert fallen.outcome == "took with damage" and "paraphrase fell from 1.00 to 0.25" in fallen.text
