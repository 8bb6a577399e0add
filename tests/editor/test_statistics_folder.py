"""Statistics in folders: what they serve, and the command that makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from collecting import alike, text
from making import on_disk
from shell import Ran, shell
from writing import SECOND, quick, write

import ffedit
from ffedit import Corpus, EditError
from ffedit.editor.statistics import check_stats
from ffedit.model.editable import Editable
from ffedit.model.memory import Address

__all__ = ["text"]


def test_a_folder_is_what_was_collected(text: Path, tmp_path: Path) -> None:
    editable = zoo.shared("llama")
    found = ffedit.collect_stats(editable, [0, 2], corpus=Corpus(text, 400))
    ffedit.save_stats(found, tmp_path / "stats")
    again = ffedit.load_stats(tmp_path / "stats", zoo.build("llama"))
    assert alike(found, again) and list(again) == [Address(0), Address(2)]
    with pytest.raises(EditError, match="exists already"):
        ffedit.save_stats(found, tmp_path / "stats")
    with pytest.raises(EditError, match=r"layers \[3\] were asked for, but llama has layers 0 to 2"):
        ffedit.collect_stats(editable, [3])


def test_statistics_of_the_hub_are_downloaded_by_name_and_checked(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable, asked = zoo.shared("llama"), []
    folder = ffedit.save_stats(ffedit.collect_stats(editable, [1], corpus=Corpus(text, 200)), tmp_path / "stats")

    def download(name: str, allow_patterns: str) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert list(ffedit.load_stats("someone/llama-stats", editable)) == [Address(1)]
    assert asked == [("someone/llama-stats", "layer-*.safetensors")]
    with pytest.raises(EditError, match="have changed since"):
        ffedit.load_stats("someone/llama-stats", zoo.build("llama", seed=1))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    folder.rename("a/b")  # what is on this machine is not looked for elsewhere
    assert list(ffedit.load_stats("a/b", editable)) == [Address(1)] and len(asked) == 2

    def refuse(name: str, allow_patterns: str) -> str:
        raise OSError("401 Client Error.\nRepository Not Found")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(EditError, match="someone/none: no such folder, nor can it be downloaded") as caught:
        ffedit.load_stats("someone/none", editable)
    assert "\n" not in str(caught.value)


def test_statistics_of_anything_else_are_refused_by_name(text: Path, tmp_path: Path) -> None:
    folder = ffedit.save_stats(
        ffedit.collect_stats(zoo.shared("llama"), [1], corpus=Corpus(text, 200)), tmp_path / "stats"
    )

    def refused(editable: Editable, message: str) -> None:
        with pytest.raises(EditError, match=message) as caught:
            ffedit.load_stats(folder, editable)
        assert "\n" not in str(caught.value) and "layer 1 of llama (float32, d_ff 48)" in str(caught.value)

    refused(zoo.shared("gpt2"), "but layer 1 of gpt2 has float32, d_ff 128")
    refused(zoo.build("llama", dtype=torch.bfloat16), "but layer 1 of llama has bfloat16, d_ff 48")
    refused(zoo.build("llama", seed=1), "have changed since")
    edited = zoo.build("llama")
    with torch.no_grad():
        edited.memories[0].value[3, 5] += 1.0
    refused(edited, "weights below that layer")
    (folder / "layer-1.safetensors").rename(folder / "layer-0.safetensors")
    assert list(ffedit.load_stats(folder, zoo.build("llama"))) == [Address(1)], "what it is of stands in the file"
    for path, message in ((tmp_path / "none", "no such folder"), (tmp_path, "holds no key statistics")):
        with pytest.raises(EditError, match=message):
            ffedit.load_stats(path, edited)


def test_statistics_of_a_dense_layer_and_of_its_experts_may_share_a_folder(tmp_path: Path, text: Path) -> None:
    for family in ("llama", "mixtral"):
        editable = zoo.build(family)
        ffedit.save_stats(ffedit.collect_stats(editable, [1], corpus=Corpus(text, 200)), tmp_path / family)
        for path in (tmp_path / family).glob("layer-*"):
            path.rename(tmp_path / path.name)
        assert {at.layer for at in ffedit.load_stats(tmp_path, editable)} == {1}


def test_on_an_edited_model_those_of_it_and_of_the_unedited_one_serve_and_no_others(text: Path) -> None:
    editable, strange = zoo.build("gpt2", bos=True), zoo.build("gpt2", bos=True)
    with torch.no_grad():
        strange.model.get_parameter("transformer.h.0.mlp.c_fc.weight").mul_(-1.3)
    unedited, other = (ffedit.collect_stats(one, [1], corpus=Corpus(text, 200)) for one in (editable, strange))
    write(editable, layer=0).apply_(editable)
    edited, before = ffedit.collect_stats(editable, [1], corpus=Corpus(text, 200)), zoo.snapshot(editable)
    for found in (unedited, edited):
        check_stats(editable, [editable.memories[1]], found)
    with pytest.raises(EditError, match="weights below that layer"):
        check_stats(editable, [editable.memories[1]], other)
    assert zoo.unchanged(editable, before)


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("kept", [True, False], ids=["with originals", "without"])
def test_statistics_of_the_base_serve_a_checkpoint_that_keeps_what_its_edits_changed(
    kept: bool, text: Path, tmp_path: Path
) -> None:
    """In the layers above the edit, too, whose keys are no longer the base's."""
    editable = ffedit.load(on_disk("gpt2", tmp_path / "base"))
    of_base = ffedit.collect_stats(editable, [0, 1, 2], corpus=Corpus(text, 200))
    folder = ffedit.save_stats(of_base, tmp_path / "stats")
    first = write(editable, layer=0)
    once = ffedit.export(editable, first, tmp_path / "once").folder
    if not kept:
        (once / "ffedit_edits" / "originals.safetensors").unlink()
    again = ffedit.load(once)
    before = zoo.snapshot(again)
    assert list(ffedit.load_stats(folder, again)) == [Address(layer) for layer in range(3 if kept else 1)]
    assert zoo.unchanged(again, before)
    (folder / "layer-0.safetensors").unlink()
    if not kept:
        with pytest.raises(EditError, match=r"weights below that layer.*have changed since"):
            ffedit.load_stats(folder, again)
        return
    stats = ffedit.load_stats(folder, again)
    assert alike(stats, {at: of_base[at] for at in stats})
    later = ffedit.edit(again, [SECOND], "emmet", layers=[1], stats=stats, config=quick())
    assert later.provenance["statistics"]["1"]["fingerprint"] == of_base[Address(1)].fingerprint
    with torch.no_grad():
        again.model.get_parameter("transformer.h.0.mlp.c_fc.weight").mul_(-1.3)
    with pytest.raises(EditError, match="weights below that layer"):
        ffedit.load_stats(folder, again)


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], empty: Path) -> Callable[..., Ran]:
    return lambda *words: shell(capsys, "stats", *words)


def test_the_command_collects_and_writes(run: Callable[..., Ran], model: Path, text: Path) -> None:
    done = run(
        "-m", model, "--corpus", text, "--layers", "0-1", "--tokens", "2000", "--out", "one", "--json", "one.json"
    )
    assert done.code == 0 and "! text.txt holds 1,500 tokens only; 2,000 were asked for" in done.out
    layers = json.loads(Path("one.json").read_text())["layers"]
    assert [row["address"] for row in layers] == ["0", "1"]
    assert layers[0]["count"] == 1500 and layers[0]["convergence"] > 0
    done = run("-m", model, "--tokens", "40", "--out", "two")
    assert done.code == 0 and "Layer 0: the usual quarter of 3 layers" in done.out and "–" in done.out, (
        "one row has no halves to compare"
    )
    assert sorted(path.name for path in Path("two").iterdir()) == ["layer-0.safetensors"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--corpus", "none.txt"], 1, "none.txt: no such file"),
        (["--tokens", "1"], 2, "--tokens"),
        (["--out", "."], 1, "exists already"),
    ],
)
def test_mistakes_are_told_before_any_work(run: Callable[..., Ran], words: list[str], code: int, message: str) -> None:
    Path("something").write_text("")
    done = run(*words)
    assert done.code == code and message in done.err and "Traceback" not in done.err
