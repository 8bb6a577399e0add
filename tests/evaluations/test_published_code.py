"""The published code on other models: what is put in its place holds in the block only, and what it gives is ROME's.

The code is not here: FFEDIT_ROME_CODE is the folder of a checkout of kmeng01/rome, for the tests that run it.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import compare
import published_code as code
import pytest
import rivals
import torch
import zoo
from click.testing import CliRunner
from writing import FACT

from ffedit import Address, Fact, FFEditError

LAYER, PREFIXES = 1, ["the river", "a city in"]
CHECKOUT = os.environ.get("FFEDIT_ROME_CODE")
needed = pytest.mark.skipif(CHECKOUT is None, reason="no checkout of kmeng01/rome: FFEDIT_ROME_CODE=DIR")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_the_code_asks_for_is_there_in_the_block_only(family: str) -> None:
    editable = zoo.build(family)
    config, tokenizer = editable.model.config, editable.tokenizer
    tokenizer.pad_token, tokenizer.padding_side = None, "left"
    known = hasattr(config, "n_embd")
    checkout = code.Checkout(ModuleType("main"), ModuleType("compute_u"), None)
    checkout.main.CONTEXT_TEMPLATES_CACHE, checkout.compute_u.get_inv_cov = None, len  # type: ignore[attr-defined]
    C_inverse = torch.eye(3)
    with pytest.raises(KeyError), code.substituted(editable, checkout, C_inverse, PREFIXES):
        assert config.n_embd == editable.d_model
        assert checkout.main.CONTEXT_TEMPLATES_CACHE == ["{}", "the river. {}", "a city in. {}"]
        assert checkout.compute_u.get_inv_cov("model", "tokenizer", "layer") is C_inverse
        rows = tokenizer(["the river", "a"], padding=True, return_tensors="pt").to("cuda")
        assert rows["input_ids"].device == editable.device
        assert rows["attention_mask"].tolist() == [[1, 1], [1, 0]]
        for made in (torch.zeros(2, device="cuda"), torch.tensor(-100, device="cuda"), torch.ones(2).to("cuda")):
            assert made.device == editable.device
        raise KeyError
    assert hasattr(config, "n_embd") == known
    assert (tokenizer.pad_token, tokenizer.padding_side) == (None, "left")
    assert checkout.main.CONTEXT_TEMPLATES_CACHE is None and checkout.compute_u.get_inv_cov is len


def test_modules_are_named_with_a_slot_for_the_layer() -> None:
    found = {family: code.module_templates((e := zoo.build(family)).memories[LAYER], e) for family in ("gpt2", "llama")}
    assert found["gpt2"] == ("transformer.h.{}", "transformer.h.{}.mlp", "transformer.h.{}.mlp.c_proj")
    assert found["llama"] == ("model.layers.{}", "model.layers.{}.mlp", "model.layers.{}.mlp.down_proj")
    opt = zoo.build("opt")
    with pytest.raises(FFEditError, match="in no feed-forward module"):
        code.module_templates(opt.memories[LAYER], opt)


def test_a_prompt_has_its_slot_where_the_fact_has_its_subject() -> None:
    request = code.request_of(Fact("Rome", "Rome is not Romeo, and Rome is in", target="Spain", occurrence=1))
    assert request == {"prompt": "Rome is not Romeo, and {} is in", "subject": "Rome", "target_new": {"str": "Spain"}}
    for prompt in ('"{}" is in', "{} {is} in"):
        with pytest.raises(FFEditError, match="leave this fact out"):
            code.request_of(Fact("Rome", prompt, target="Spain"))


def test_a_tokenizer_that_puts_a_token_in_front_is_refused() -> None:
    checkout = code.Checkout(ModuleType("main"), ModuleType("compute_u"), None)
    with pytest.raises(FFEditError, match="puts 1 tokens in front of a text"):
        code.published_code(zoo.build("llama", bos=True), FACT, LAYER, torch.eye(48), [], checkout)


@pytest.mark.parametrize("given", [["--way", "published-code"], ["--published-code", "."]])
def test_the_way_and_its_checkout_need_each_other(given: list[str], tmp_path: Path) -> None:
    run = CliRunner().invoke(compare.main, ["--model", "none", "--data", __file__, "--out", str(tmp_path), *given])
    assert run.exit_code == 2 and "need each other" in run.output


def test_a_folder_without_the_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FFEditError, match="give a checkout of kmeng01/rome"):
        code.open_checkout(tmp_path)


@needed
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_code_gives_the_update_of_the_procedure_where_both_are_the_same(family: str) -> None:
    """Without prefixes k* is the bare prompt's in both; the first step from δ = 0 knows neither KL term nor decay."""
    assert CHECKOUT is not None
    editable = zoo.build(family)
    before, here = zoo.snapshot(editable), Path.cwd()
    keys = torch.randn(400, d_ff := editable.memories[LAYER].d_ff, generator=torch.Generator().manual_seed(0)).double()
    C = keys.T @ keys / len(keys) + torch.eye(d_ff)
    checkout = code.open_checkout(Path(CHECKOUT))
    assert Path.cwd() == here
    updates = {}
    for steps in (2, 20):
        checkout.numbers.v_num_grad_steps = steps
        inverse = torch.linalg.inv(C).float()
        updates[steps] = code.published_code(editable, FACT, LAYER, inverse, [], checkout)
        assert zoo.unchanged(editable, before)
        assert all(p.requires_grad for p in editable.model.parameters())
    own = rivals.published_rome(editable, FACT, LAYER, C, [], 2)
    torch.testing.assert_close(
        updates[2].updates[Address(LAYER)].dense, own.updates[Address(LAYER)].dense, rtol=1e-3, atol=1e-6
    )
    assert updates[20].losses[0] == pytest.approx(own.losses[0], abs=1e-3)
    assert updates[20].losses[-1] < updates[20].losses[0]
    # Other prefixes, another k*.
    other = code.published_code(editable, FACT, LAYER, inverse, PREFIXES, checkout)
    assert not torch.allclose(other.right, updates[20].right, atol=1e-3)
