"""The memory view: values and triggers are those of a plain search, one prefix at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from shell import TEXT
from shown import shown
from torch import Tensor

from ffedit import Corpus, EditError, MemoryIndex
from ffedit.display.terminal.memories import memory_view
from ffedit.inspector.memory_view import MemoryView, inspect_memory
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture
from ffedit.model.memory import Address

OTHER = "the Nile river flows through Egypt . Leo Tolstoy wrote Anna Karenina in Germany , known for a big violin . "


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (path := tmp_path / "text.txt").write_text(TEXT + OTHER)
    return Corpus(path)


def coefficient(editable: Editable, slot: MemoryIndex, ids: tuple[int, ...]) -> float:
    """m_i at the last of `ids`, which run by themselves."""
    with capture({0: editable.memories[slot.address].module}, inputs=True) as seen, torch.no_grad():
        editable.model(input_ids=torch.tensor([ids]))
    return float(seen[0].reshape(len(ids), -1)[-1, slot.index])


def norm(x: Tensor, family: str, editable: Editable) -> Tensor:
    module = editable.model.get_submodule(editable.norm)
    if family == "llama":
        return x / (x.square().mean() + module.variance_epsilon).sqrt() * module.weight
    return (x - x.mean()) / (x.var(unbiased=False) + module.eps).sqrt() * module.weight + module.bias


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama"])  # ReLU, GELU, SwiGLU
def test_a_memory_is_what_a_plain_search_finds(family: str, corpus: Corpus) -> None:
    editable, slot = zoo.shared(family), MemoryIndex(Address(1), 7)
    view = inspect_memory(editable, "1.7", corpus=corpus, top=5)
    text = tuple(editable.tokenizer(TEXT + OTHER)["input_ids"])
    prefixes = {
        text[start : end + 1]: text[end + 1]
        for start in range(0, len(text) - 1, 64)
        for end in range(start, min(start + 64, len(text) - 1))
    }
    found = {ids: coefficient(editable, slot, ids) for ids in prefixes}
    best = [ids for ids in sorted(found, key=lambda ids: -found[ids]) if found[ids] > 0][:5]
    assert view.tokens == len(text) - 1 and view.slot == slot and view.layers == 3
    assert [one.coefficient for one in view.triggers] == pytest.approx([found[ids] for ids in best], rel=1e-4)
    with torch.no_grad():
        value = editable.memories[1].value[:, 7]
        p = (editable.unembedding.weight @ norm(value, family, editable)).softmax(-1)
    assert view.value_norm == pytest.approx(float(value.norm()))
    assert view.value.max_probability == pytest.approx(float(p.max()), abs=1e-5)
    assert [one.id for one in view.value.top] == p.topk(5).indices.tolist()
    assert [one.id for one in view.value.bottom] == p.topk(5, largest=False).indices.tolist()
    for one, ids in zip(view.triggers, best, strict=True):
        words = [*one.prefix.text.split(), one.prefix.last.strip()]
        assert words == editable.tokenizer.decode(ids).split()
        assert one.next.id == prefixes[ids] and one.next.probability == pytest.approx(float(p[one.next.id]), abs=1e-5)
        assert one.rank == int((p > p[one.next.id]).sum()) + 1
    assert view.active == pytest.approx(sum(found[ids] > 0 for ids in prefixes) / len(prefixes))


def test_equal_prefixes_are_shown_once(tmp_path: Path) -> None:
    (path := tmp_path / "same.jsonl").write_text('{"text": "the old tower stands in Rome ."}\n' * 9)
    view = inspect_memory(zoo.shared("gpt2"), "0.3", corpus=Corpus(path), top=20)
    prefixes = [one.prefix for one in view.triggers]
    assert len(set(prefixes)) == len(prefixes) <= 7


def test_a_memory_that_nothing_fires_has_no_triggers(corpus: Corpus) -> None:
    editable = zoo.build("opt")
    with torch.no_grad():
        editable.layers[1].fc1.bias[7] = -1e6
    view = inspect_memory(editable, MemoryIndex(Address(1), 7), corpus=corpus)
    assert (view.triggers, view.active) == ((), 0)
    assert "Nothing" in shown(memory_view(view)) and view.to_dict()["triggers"] == []


def test_by_default_the_model_samples_the_text() -> None:
    view = inspect_memory(zoo.shared("gpt2", True), "2.5", corpus=Corpus(tokens=200), top=3)
    assert view.tokens > 150 and "sampled" in view.corpus


@pytest.mark.parametrize("width", [80, 120])
def test_the_last_token_of_a_trigger_is_marked(width: int, corpus: Corpus) -> None:
    view: MemoryView = inspect_memory(zoo.shared("gpt2"), "1.7", corpus=corpus, top=4)
    text = shown(memory_view(view), width)
    for one in view.triggers:
        assert f"«{one.prefix.last.strip()}»" in text
    for words in ("says most", "says least", "next", "place", "active"):
        assert words in text
    assert text.isascii() is False and shown(memory_view(view), 40)


@pytest.mark.parametrize(
    ("family", "name", "says"),
    [
        *(("gpt2", name, "L.I") for name in ("", "3", "a.b", "1.2.3.4", "-1.2", "1.", "１.2", f"{'9' * 20}.1")),
        ("gpt2", "3.0", "layers 0 to 2"),
        ("gpt2", "0.128", "memories 0 to 127"),
        ("gpt2", "0.0.1", "no experts"),
        ("mixtral", "1.4.0", "layer 1 has experts 0 to 3"),
        ("mixtral", "1.7", "write L.E.I"),
        ("mixtral", "3.0.0", "layers 0 to 2"),
        ("mixtral", "1.3.48", "memories 0 to 47"),
        ("gpt2", MemoryIndex(0, 17), "address of a layer"),  # type: ignore[arg-type]
        ("gpt2", MemoryIndex(Address(0), "17"), "a whole number"),  # type: ignore[arg-type]
    ],
)
def test_names_that_are_none_are_refused(family: str, name: str | MemoryIndex, says: str) -> None:
    with pytest.raises(EditError, match=says) as caught:
        inspect_memory(zoo.shared(family), name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"the"])
def test_texts_that_hold_none_are_refused(content: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(EditError, match="holds fewer than two tokens"):
        inspect_memory(zoo.shared("gpt2"), "0.0", corpus=Corpus(path))
