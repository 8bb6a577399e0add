"""What changed between two checkpoints, and which part of it rounding does not explain."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from making import made, on_disk
from safetensors.torch import load_file, save_file
from shell import save_model, shell

import ffedit
from ffedit import ModelError
from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.rounding import noise_floor, recover
from ffedit.exporter.embedded_edits import embed

MATRIX = "model.layers.1.mlp.down_proj.weight"


def thin(d_out: int, d_in: int, rank: int, seed: int = 0) -> LowRank:
    g = torch.Generator().manual_seed(seed)
    return LowRank(torch.randn(d_out, rank, generator=g).double(), torch.randn(rank, d_in, generator=g).double())


def scaled(delta: LowRank, weight: torch.Tensor, ratio: float) -> LowRank:
    return LowRank(delta.left * (ratio * float(weight.double().norm()) / delta.norm()), delta.right)


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
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


# Rank above the noise -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 48), (256, 700)])
@pytest.mark.parametrize("rank", [2, 5])
@pytest.mark.parametrize("writes", [1, 2])
def test_the_rank_is_that_of_the_change_and_not_of_its_rounding(
    dtype: torch.dtype, shape: tuple[int, int], rank: int, writes: int
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    delta = scaled(thin(*shape, rank), weight, 0.3)
    stored = weight
    for i in range(writes):  # one edit upon another, each rounded
        stored = (stored.double() + delta.left[:, i::writes] @ delta.right[i::writes]).to(dtype)
    difference = stored.double() - weight.double()
    floor = noise_floor(stored, dtype)
    found = recover(difference, floor)
    assert found.rank == found.update.rank == rank and not found.more
    noise = float(torch.linalg.matrix_norm(difference - delta.dense, 2))
    assert 0.4 * floor < noise < floor, "the floor is above the noise, and not far"
    assert float(found.values[-1]) > 0, "rounded, the difference has full rank"
    assert float(torch.linalg.matrix_norm(found.update.dense - delta.dense, 2)) < floor


def test_as_many_directions_are_kept_as_are_asked_for() -> None:
    matrix = thin(40, 60, 5).dense
    best = torch.linalg.svdvals(matrix)
    found = recover(matrix, 1e-9, rank=2)
    assert (found.rank, found.update.rank, found.more) == (5, 2, False)
    gap = torch.linalg.matrix_norm(matrix - found.update.dense)
    assert float(gap) == pytest.approx(float(best[2:].norm()), rel=1e-9), "the best of rank 2 (Eckart and Young)"
    assert recover(matrix, 1e-9, rank=100).update.rank == 40


def test_large_matrices_are_decomposed_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffedit.algebra.rounding.WHOLE", 16)
    weight = torch.randn(300, 500, generator=torch.Generator().manual_seed(2)).bfloat16()
    for rank, wanted, more in ((3, 3, False), (70, 70, False), (300, 256, True)):
        delta = scaled(thin(300, 500, rank), weight, 0.5)
        stored = (weight.double() + delta.dense).bfloat16()
        difference = stored.double() - weight.double()
        floor = noise_floor(stored, torch.bfloat16)
        found = recover(difference, floor)
        assert (found.rank, found.more) == (wanted, more)
        exact = torch.linalg.svdvals(difference)[: min(rank, 20)]
        torch.testing.assert_close(found.values[: len(exact)], exact, rtol=1e-2 if more else 1e-6, atol=0.0)
        if not more:
            assert float(torch.linalg.matrix_norm(found.update.dense - delta.dense, 2)) < 2 * floor


# Folders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_edit_is_found_with_its_rank_and_size(pair: Callable[..., tuple[Path, Path]], dtype: torch.dtype) -> None:
    weight = zoo.build("llama", dtype=dtype).memories[1].value
    delta = scaled(thin(32, 48, 2), weight, 0.2)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MATRIX] = (tensors[MATRIX].double() + delta.dense).to(dtype)

    base, edited = pair(edit, dtype)
    found = ffedit.diff(base, edited)
    (change,) = found.changes
    assert change.name == MATRIX and change.shape == (32, 48) and change.rank == 2
    assert change.norm_ratio == pytest.approx(0.2, rel=1e-2) and change.norm == pytest.approx(delta.norm(), rel=1e-2)
    assert change.exact and change.share > 0.9 and len(change.values) == 32
    assert change.update is not None
    off = torch.linalg.matrix_norm(change.update.dense - delta.dense, 2)
    assert float(off) < change.floor < change.values[1]
    assert not found.identical and found.same == len(load_file(base / "model.safetensors")) - 1
    assert not (found.missing or found.added or found.reshaped or found.retyped)
    wider = ffedit.diff(base, edited, rank=5).changes[0]
    assert wider.rank == 2 and wider.update is not None and wider.update.rank == 5


def test_a_change_that_mostly_rounds_away_is_called_an_estimate(pair: Callable[..., tuple[Path, Path]]) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        delta = scaled(thin(32, 48, 1), tensors[MATRIX], 0.002)
        tensors[MATRIX] = (tensors[MATRIX].double() + delta.dense).bfloat16()

    (change,) = ffedit.diff(*pair(edit, torch.bfloat16)).changes
    assert 0 < change.share < 0.9 and not change.exact and not change.more


def test_everything_that_differs_is_named(pair: Callable[..., tuple[Path, Path]]) -> None:
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
    assert norm.name == "model.layers.0.input_layernorm.weight" and norm.rank is None and norm.share == 1.0
    assert norm.norm == pytest.approx(32**0.5, rel=1e-5)
    json.dumps(found.to_dict())


def test_another_precision_is_compared_in_the_coarser(
    pair: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        delta = scaled(thin(32, 48, 1), tensors[MATRIX], 0.3)
        tensors[MATRIX] += delta.dense.float()
        for name, tensor in tensors.items():
            tensors[name] = tensor.bfloat16()

    base, edited = pair(change)
    found = ffedit.diff(base, edited)
    many = len(found.retyped)
    assert f"{many} tensors F32 → BF16" in shell(capsys, "diff", base, edited).out
    assert [(change.name, change.rank, change.dtype) for change in found.changes] == [(MATRIX, 1, "F32 → BF16")]
    assert found.same == 0 and many > 20


def test_matrices_of_one_tensor_are_compared_one_by_one(pair: Callable[..., tuple[Path, Path]]) -> None:
    base, edited = pair(lambda tensors: None)
    experts = torch.randn(4, 20, 30, generator=torch.Generator().manual_seed(0))
    save_file({"experts": experts}, base / "model.safetensors")
    changed = experts.clone()
    changed[2] += scaled(thin(20, 30, 1), experts[2], 0.1).dense.float()
    save_file({"experts": changed}, edited / "model.safetensors")
    (change,) = ffedit.diff(base, edited).changes
    assert (change.name, change.shape, change.rank) == ("experts[2]", (20, 30), 1)


def test_a_number_that_is_none_has_no_rank(pair: Callable[..., tuple[Path, Path]]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MATRIX][0, 0] = float("nan")

    (found,) = ffedit.diff(*pair(change)).changes
    assert found.name == MATRIX and found.rank is None


# The command --------------------------------------------------------------------------------------


def test_no_difference_is_said_in_words(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ffedit.diff(model, model)
    assert found.identical and found.same > 20
    done = shell(capsys, "diff", model, model)
    assert done.code == 0 and f"No difference: all {found.same} tensors are the same." in done.out
    assert "No difference" in shell(capsys, "diff", "atlas", "atlas").out


def test_the_command_shows_what_changed(
    pair: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MATRIX] += scaled(thin(32, 48, 1), tensors[MATRIX], 0.25).dense.float()

    monkeypatch.setenv("COLUMNS", "120")
    base, edited = pair(change)
    done = shell(capsys, "diff", base, edited)
    line = next(line for line in done.out.splitlines() if MATRIX in line)
    assert line.split()[1:] == ["32", "×", "48", "F32", "1", *line.split()[6:7], "25.00%", "100%"]
    assert "1 tensor changed" in done.out and done.err == ""
    told = json.loads(shell(capsys, "diff", base, edited, "--json", "-").out)
    assert told["changes"][0]["rank"] == 1 and told["identical"] is False


def test_what_is_no_checkpoint_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("./nowhere", "some-org/some-model", str(tmp_path)):
        with pytest.raises(ModelError) as caught:
            ffedit.diff(model, name)
        assert "\n" not in str(caught.value)
    done = shell(capsys, "diff", "./nowhere", model)
    assert done.code == 1 and done.err.startswith("error: ./nowhere: no such folder")


# As an edit ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_difference_becomes_an_edit_that_takes_the_base_there(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_model(zoo.build(family), tmp_path / "base")
    shutil.copytree(base, tmp_path / "edited")
    editable = ffedit.load(base)
    tensors, memories = load_file(base / "model.safetensors"), [editable.memories[layer] for layer in (0, 2)]
    deltas = [scaled(thin(*memory.shape, 2, seed), memory.value, 0.2) for seed, memory in enumerate(memories)]
    for memory, delta in zip(memories, deltas, strict=True):
        tensors[memory.parameter] += (delta.dense.T if memory.stored_transposed else delta.dense).float()
    save_file(tensors, tmp_path / "edited" / "model.safetensors", metadata={"format": "pt"})
    done = shell(capsys, "diff", base, tmp_path / "edited", "--out", tmp_path / "e")
    assert done.code == 0 and "Saved an edit of rank 2" in done.out
    edit = ffedit.Edit.load(tmp_path / "e")
    assert edit.layers == [0, 2] and edit.facts == () and edit.provenance["method"] == "diff"
    edit.apply_(editable)
    for memory, delta in zip(memories, deltas, strict=True):
        wanted = tensors[memory.parameter].T if memory.stored_transposed else tensors[memory.parameter]
        assert float((memory.value - wanted).norm()) < 1e-5 * delta.norm()
    assert "diff, layers 0, 2, rank 2" in shell(capsys, "show", tmp_path / "e").out
    exported = shell(capsys, "export", tmp_path / "e", "--format", "delta", "--out", tmp_path / "d")
    assert exported.code == 0, exported.err
    again = shell(capsys, "diff", base, tmp_path / "edited", "--out", tmp_path / "e", "--rank", "1")
    assert again.code == 1 and "exists already" in again.err
    shell(capsys, "diff", base, tmp_path / "edited", "--out", tmp_path / "e", "--rank", "1", "--force")
    assert ffedit.Edit.load(tmp_path / "e").rank == 1


def test_what_no_edit_can_hold_is_not_saved(
    pair: Callable[..., tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] += 1

    base, edited = pair(change)
    for name, words in (
        (edited, "cannot be part of an edit, which changes only value matrices"),
        (base, "no more than rounding"),
    ):
        done = shell(capsys, "diff", base, name, "--out", tmp_path / "e")
        assert done.code == 1 and words in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "e").exists()


def test_the_facts_of_an_edited_checkpoint_come_along(tmp_path: Path) -> None:
    base = on_disk("gpt2", tmp_path / "base")
    editable = ffedit.load(base)
    edit = made(editable, {1: 1})
    edit.apply_(editable)
    editable.model.save_pretrained(tmp_path / "edited")
    embed(tmp_path / "edited", [edit], {})
    found = ffedit.edit_from_diff(ffedit.load(base), ffedit.diff(base, tmp_path / "edited"))
    assert found.facts == edit.facts and found.rank == 1 and found.base == edit.base
