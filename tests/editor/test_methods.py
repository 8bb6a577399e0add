"""Every method, end to end: what it stores in the real forward pass, and that it leaves no trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from storing import AGAIN, BARE, EXACT, FACTS, SOLVING, clean, missed, write
from writing import CORPUS, FACT, SECOND, quick

from ffedit import EditError, Fact, PromptConfig
from ffedit.editor.methods import METHODS
from ffedit.editor.methods.alphaedit import AlphaEditConfig
from ffedit.editor.methods.memit import MemitConfig
from ffedit.editor.statistics import collect
from ffedit.editor.write import write as write_facts
from ffedit.model.memory import Address

pytestmark = pytest.mark.usefixtures("warm_cache")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "numbers", [BARE, {"contexts": 3}, {"contexts": 3, "context_weight": 1.0}], ids=["bare", "in contexts", "steady"]
)
def test_emmet_gives_every_subject_its_mean_value_exactly(family: str, numbers: dict[str, Any]) -> None:
    editable = zoo.trained(family, True)
    edit = write(editable, FACTS, "emmet", **numbers)
    assert float(missed(editable, edit, quick(**numbers)).max()) < 1e-4
    assert edit.keys[Address(1)].shape[1] == edit.values[Address(1)].shape[1] == 3


@pytest.mark.parametrize("method", ["memit", "alphaedit"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_memit_and_alphaedit_store_a_value_but_for_the_share_of_their_ridge(family: str, method: str) -> None:
    editable, left = zoo.trained(family, True), []
    for give_up in (0.01, 0.0001):
        edit = write(
            editable, FACTS, method, **BARE, memit_ridge=give_up, alphaedit_ridge=give_up, alphaedit_null_share=0.3
        )
        left.append(float(missed(editable, edit, quick(**BARE)).max()))
    assert 0.3 > left[0] > 3 * left[1] > 0
    alone = write(editable, [FACT], method, **BARE, context_weight=0.0, keep_beginning=False)
    config = quick(**BARE)
    share = (MemitConfig if method == "memit" else AlphaEditConfig)().ridge
    assert float(missed(editable, alone, config)) == pytest.approx(share / (1 + share), rel=1e-2)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_alphaedit_may_give_up_nothing_to_the_size_of_its_change(family: str) -> None:
    """The end that smaller and smaller shares lead to, with contexts in fewer directions than there are."""
    editable = zoo.trained(family, True)
    numbers = {"contexts": 3, "context_weight": 1.0, "alphaedit_null_share": 0.3}
    found = [write(editable, FACTS, "alphaedit", **numbers, alphaedit_ridge=share) for share in (0.01, 1e-9, 0.0)]
    dense = [torch.cat([delta.dense for delta in edit.updates.values()], 1) for edit in found]
    sizes = [float(delta.norm()) for delta in dense]
    assert sizes[0] < sizes[1] <= sizes[2]
    assert float((dense[1] - dense[2]).norm()) < 0.01 * sizes[2] < float((dense[0] - dense[2]).norm())


@pytest.mark.parametrize("method", SOLVING)
def test_the_rank_is_that_of_the_subjects(method: str) -> None:
    editable = zoo.trained("llama", True)
    edit = write(editable, [FACT, SECOND, AGAIN], method)
    delta = edit.updates[Address(1)]
    assert edit.rank == delta.rank == 2 == int(torch.linalg.matrix_rank(delta.dense))
    assert edit.facts == (FACT, SECOND, AGAIN) and [s["facts"] for s in edit.provenance["solved"]] == [2, 1]
    assert edit.provenance["method"] == method and edit.provenance["division"]["1"] > [0.0, 0.0]


def test_more_subjects_than_keys_are_written_by_least_squares_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of d_ff keys holds d_ff exact values; least squares has no such bound."""
    editable = zoo.trained("gpt2_square", True)
    many = [Fact(f"{name} tower", "the {} is located in", "Rome", "Paris") for name in zoo.WORDS[3:36]]
    numbers = {**BARE, "steps": 1}
    assert len(many) == editable.memories[1].d_ff + 1
    edit = write(editable, many, "memit", **numbers)
    assert edit.rank == 33 and edit.updates[Address(1)].is_finite()
    monkeypatch.setattr("ffedit.editor.solve.choose_values", None)  # refused before the long work
    with pytest.raises(EditError, match="33 facts and 1 independent kept keys, but only 32 keys"):
        write(editable, many, "emmet", **numbers)


def test_keys_that_no_exact_value_can_be_given_are_refused_before_values_are_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    editable, before = zoo.trained("gpt2", True), zoo.snapshot(zoo.trained("gpt2", True))
    # Another subject that ends at the same token, behind the same words, has the same key.
    tower = Fact("tower", "the Eiffel {} stands in", "Berlin", "Paris")
    kept = write(editable, [FACT], "emmet", **BARE)
    for module in ("solve", "value"):
        monkeypatch.setattr(f"ffedit.editor.{module}.choose_values", None)
    for layers in ([1], [0, 1]):
        with pytest.raises(EditError, match="key 2 of 2 is the same as another"):
            write(editable, [FACT, tower], "emmet", layers, **BARE)
    for method in EXACT:
        with pytest.raises(EditError, match=r"key 1 of 1 is the same as another, or a mixture .* kept keys"):
            write(editable, [tower], method, preserve=[kept], **BARE)
    assert clean(editable, before)


# No trace -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rome", "memit", "ft"])
def test_the_model_is_as_before_also_when_interrupted_or_failing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("gpt2", True)
    layers, before, calls = [0, 1] if METHODS[method].layers else [1], zoo.snapshot(editable), []
    config = quick(**BARE, steps=2, ft_steps=3)
    stats = collect(editable, [editable.memories[layer] for layer in layers], CORPUS)

    def run(fails_at: int | None, error: BaseException) -> None:
        seen = []

        def progress(*step: Any) -> None:
            seen.append(step)
            if len(seen) - 1 == fails_at:
                raise error

        write_facts(editable, FACTS[:2], method, layers, config, stats, progress=progress)
        calls.append(len(seen))

    run(None, KeyboardInterrupt())
    assert clean(editable, before) and calls[0] >= 3
    for at in range(calls[0]):
        error: BaseException = KeyboardInterrupt() if at % 2 else OSError("no more")
        with pytest.raises(type(error)):
            run(at, error)
        assert clean(editable, before), at


@pytest.mark.parametrize("method", ["rome", "ft"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_edit_where_gradients_are_off_is_the_edit(method: str, mode: Any) -> None:
    editable = zoo.trained("gpt2", True)
    usual = write(editable, [FACT], method, **BARE)
    with mode():
        again = write(editable, [FACT], method, **BARE)
    assert again.fingerprint() == usual.fingerprint()


def test_numbers_of_numpy_are_saved_and_a_seed_is_a_whole_number(tmp_path: Path) -> None:
    config = dataclasses.replace(quick(**BARE), seed=np.int64(3))
    config = dataclasses.replace(config, value=dataclasses.replace(config.value, steps=np.int64(2)))
    assert PromptConfig(context_tokens=[3]).context_tokens == (3,)  # type: ignore[arg-type]
    edit = write_facts(zoo.trained("gpt2", True), [FACT], "rome", [0], config, CORPUS)
    edit.save(tmp_path / "edit")
    with pytest.raises(EditError, match="seed is 'x'; a whole number"):
        dataclasses.replace(config, seed="x")  # type: ignore[arg-type]
