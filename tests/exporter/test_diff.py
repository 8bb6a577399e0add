"""What changed between two checkpoints, and how far."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from shell import save_model, shell

import ffedit
from ffedit import ModelError
from ffedit.algebra.low_rank import LowRank

MATRIX = "model.layers.1.mlp.down_proj.weight"
Pair = Callable[..., tuple[Path, Path]]


def thin(d_out: int, d_in: int, rank: int, seed: int = 0) -> LowRank:
    g = torch.Generator().manual_seed(seed)
    return LowRank(torch.randn(d_out, rank, generator=g).double(), torch.randn(rank, d_in, generator=g).double())


def scaled(delta: LowRank, weight: torch.Tensor, ratio: float) -> LowRank:
    return LowRank(delta.left * (ratio * float(weight.double().norm()) / delta.norm()), delta.right)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Two folders of one model in `dtype`, the second rewritten by a function of its tensors."""

    def make(
        change: Callable[[dict[str, torch.Tensor]], object], dtype: torch.dtype = torch.float32
    ) -> tuple[Path, Path]:
        base = save_model(zoo.build("llama", dtype=dtype), tmp_path / "base")
        shutil.copytree(base, tmp_path / "edited")
        tensors = load_file(base / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "edited" / "model.safetensors", metadata={"format": "pt"})
        return base, tmp_path / "edited"

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_edit_is_found_with_its_size(pair: Pair, dtype: torch.dtype) -> None:
    weight = zoo.build("llama", dtype=dtype).memories[1].value
    delta = scaled(thin(32, 48, 2), weight, 0.2)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MATRIX] = (tensors[MATRIX].double() + delta.dense).to(dtype)

    base, edited = pair(edit, dtype)
    found = ffedit.diff(base, edited)
    (change,) = found.changes
    assert change.name == MATRIX and change.shape == (32, 48)
    assert change.norm_ratio == pytest.approx(0.2, rel=1e-2) and change.norm == pytest.approx(delta.norm(), rel=1e-2)
    assert change.share > 0.9
    assert not found.identical and found.same == len(load_file(base / "model.safetensors")) - 1
    assert not (found.missing or found.added or found.reshaped or found.retyped)


def test_entries_that_round_back_are_not_in_the_share(pair: Pair) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        delta = scaled(thin(32, 48, 1), tensors[MATRIX], 0.002)
        tensors[MATRIX] = (tensors[MATRIX].double() + delta.dense).bfloat16()

    base, edited = pair(edit, torch.bfloat16)
    (change,) = ffedit.diff(base, edited).changes
    ours, theirs = (load_file(folder / "model.safetensors")[MATRIX] for folder in (base, edited))
    assert 0 < change.share < 0.9 and change.share == pytest.approx(float((ours != theirs).double().mean()))


def test_everything_that_differs_is_named(pair: Pair) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["extra.weight"] = torch.ones(3)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:5].clone()
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].double()
        tensors["model.layers.0.input_layernorm.weight"] += 1.0

    base, edited = pair(change)
    found = ffedit.diff(base, edited)
    assert found.missing == ("model.norm.weight",) and found.added == ("extra.weight",)
    assert found.reshaped == ("lm_head.weight: [97, 32] → [5, 32]",)
    assert found.retyped == ("model.embed_tokens.weight: F32 → F64",)
    (norm,) = found.changes
    assert norm.name == "model.layers.0.input_layernorm.weight" and norm.share == 1.0
    assert norm.norm == pytest.approx(32**0.5, rel=1e-5)
    json.dumps(found.to_dict())


def test_another_precision_is_compared_in_the_coarser(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        delta = scaled(thin(32, 48, 1), tensors[MATRIX], 0.3)
        tensors[MATRIX] += delta.dense.float()
        for name, tensor in tensors.items():
            tensors[name] = tensor.bfloat16()

    base, edited = pair(change)
    found = ffedit.diff(base, edited)
    many = len(found.retyped)
    assert f"{many} tensors F32 → BF16" in shell(capsys, "diff", base, edited).out
    assert [(change.name, change.dtype) for change in found.changes] == [(MATRIX, "F32 → BF16")]
    assert found.same == 0 and many > 20


def test_matrices_of_one_tensor_are_compared_one_by_one(pair: Pair) -> None:
    base, edited = pair(lambda tensors: None)
    experts = torch.randn(4, 20, 30, generator=torch.Generator().manual_seed(0))
    save_file({"experts": experts}, base / "model.safetensors")
    changed = experts.clone()
    changed[2] += scaled(thin(20, 30, 1), experts[2], 0.1).dense.float()
    save_file({"experts": changed}, edited / "model.safetensors")
    (change,) = ffedit.diff(base, edited).changes
    assert (change.name, change.shape) == ("experts[2]", (20, 30))


def test_a_number_that_is_none_is_a_change(pair: Pair) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MATRIX][0, 0] = float("nan")

    (found,) = ffedit.diff(*pair(change)).changes
    assert found.name == MATRIX and math.isnan(found.norm)


# The command --------------------------------------------------------------------------------------


def test_no_difference_is_said_in_words(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ffedit.diff(model, model)
    assert found.identical and found.same > 20
    done = shell(capsys, "diff", model, model)
    assert done.code == 0 and f"No difference: all {found.same} tensors are the same." in done.out
    assert "No difference" in shell(capsys, "diff", "atlas", "atlas").out


def test_the_command_shows_what_changed(
    pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MATRIX] += scaled(thin(32, 48, 1), tensors[MATRIX], 0.25).dense.float()

    monkeypatch.setenv("COLUMNS", "120")
    base, edited = pair(change)
    done = shell(capsys, "diff", base, edited)
    line = next(line for line in done.out.splitlines() if MATRIX in line)
    assert line.split()[1:] == ["32", "×", "48", "F32", *line.split()[5:6], "25.00%", "100%"]
    assert "1 tensor changed" in done.out and done.err == ""
    told = json.loads(shell(capsys, "diff", base, edited, "--json", "-").out)
    assert told["changes"][0]["norm_ratio"] == pytest.approx(0.25, rel=1e-3) and told["identical"] is False


def test_what_is_no_checkpoint_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("./nowhere", "some-org/some-model", str(tmp_path)):
        with pytest.raises(ModelError) as caught:
            ffedit.diff(model, name)
        assert "\n" not in str(caught.value)
    done = shell(capsys, "diff", "./nowhere", model)
    assert done.code == 1 and done.err.startswith("error: ./nowhere: no such folder")
