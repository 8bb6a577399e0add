"""One suite for every family. Its other items stand where they are tested for all families, too:

    anatomy verified                    test_verify
    reruns equal whole passes           test_replay
    a trace equals the reference        test_trace
    FF = Σ m_i v_i                      test_first_layer, test_prompt_view
    before, added, after                test_activations

Here: what ROME asked for is there in the real forward pass, and makes the new object likelier, undo is exact,
checkpoints open in a fresh process with equal logits, adapters do what PEFT lets them, several layers share a value,
and docs/families.md says what was measured.
"""

from __future__ import annotations

import families
import pytest
import torch
from families import FAMILIES, NEAR

pytest.importorskip("peft")
every_family = pytest.mark.parametrize("family", FAMILIES)
# PEFT takes every module called `down_proj` for an expert's.
NO_ADAPTER = {"qwen3_next"}
NORMED = {"gemma2", "gemma3", "olmo2"}


# What works ---------------------------------------------------------------------------------------


@every_family
def test_what_rome_asked_for_is_there_in_the_real_forward_pass(family: str) -> None:
    assert families.case(family).missed < NEAR


@every_family
def test_an_edit_changes_its_matrices_alone_and_is_undone_to_the_bit(family: str) -> None:
    assert families.case(family).undone


@every_family
def test_a_fresh_process_sees_the_logits_of_the_edited_model(family: str) -> None:
    expected, found = families.case(family).logits, families.reopened()[family]
    assert torch.equal(found, expected)
    with torch.no_grad():
        before = families.case(family).editable.model(input_ids=families.IDS).logits
    assert float((expected - before).abs().max()) > 1e-3 * float(before.abs().max()), "the edit does something"


@every_family
def test_an_adapter_gives_the_same_logits_or_says_why_it_cannot(family: str) -> None:
    told = families.case(family).adapter
    assert ("export a checkpoint (--format)" in told) == bool(told) == (family in NO_ADAPTER) and "\n" not in told


@every_family
def test_several_layers_share_a_value(family: str) -> None:
    assert families.case(family).spread == ""


@every_family
def test_an_edit_takes(family: str) -> None:
    """By the default numbers of a value, in a model that was trained to know the fact."""
    assert families.case(family).took > families.TWICE


@every_family
def test_what_reaches_the_residual_stream_is_normalised_or_scaled_as_the_model_says(family: str) -> None:
    way = families.way_to_stream(family)
    assert way.known and (way.norm is not None) == (family in NORMED)
    assert way.factor == pytest.approx({"granite": 0.5}.get(family, 1.0), rel=1e-3)


def test_the_document_says_what_was_measured() -> None:
    document = families.DOCUMENT.read_text(encoding="utf-8")
    assert document.startswith(families.tables()), "run python tests/helpers/families.py"
