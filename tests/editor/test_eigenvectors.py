"""The eigenvectors of C, which take longer than all else at a large d_ff: computed once, where there is room, kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor
from writing import CORPUS, FACT, SECOND, quick

from ffedit.editor import statistics
from ffedit.editor.statistics import cached_eigh, collect
from ffedit.editor.write import write as write_facts
from ffedit.files import cache

CPU = torch.device("cpu")


def symmetric(size: int = 24, seed: int = 0) -> Tensor:
    rows = torch.randn(size, 2 * size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows @ rows.T


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that were decomposed."""
    sizes, plainly = [], torch.linalg.eigh

    def eigh(C: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(C))
        return plainly(C)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    return sizes


def entries() -> list[Path]:
    return [path for path in cache.entries() if path.parent.name == "eigenvectors"]


def test_a_second_edit_reads_what_the_first_computed(computed: list[int]) -> None:
    editable = zoo.trained("gpt2", True)
    edits = [write_facts(editable, [fact], "alphaedit", [1], quick(), CORPUS) for fact in (FACT, FACT, SECOND)]
    d_ff = editable.memories[1].d_ff
    assert computed == [d_ff] and len(entries()) == 1
    first, again = (edit.updates[editable.memories[1].address].dense for edit in edits[:2])
    assert torch.equal(first, again)
    write_facts(editable, [FACT], "alphaedit", [0], quick(), CORPUS)
    assert computed == [d_ff, d_ff] and len(entries()) == 2, "another layer has another C"
    for method in ("memit", "emmet", "rome"):
        write_facts(editable, [FACT], method, [1], quick(), CORPUS)
    assert len(computed) == 2


def test_cached_eigenvectors_are_those_of_c_and_of_no_other(computed: list[int]) -> None:
    C, other = symmetric(), symmetric()
    other[3, 3] += 1e-9
    for matrix in (C, C, other):
        values, vectors = cached_eigh(matrix, CPU)
        torch.testing.assert_close(vectors @ torch.diag(values) @ vectors.T, matrix, rtol=1e-12, atol=1e-10)
        assert torch.equal(values, values.sort().values)
    assert len(computed) == 2


@pytest.mark.parametrize("how", ["flipped", "of another", "no tensors"])
def test_a_damaged_file_is_not_used(how: str, computed: list[int]) -> None:
    C = symmetric()
    expected = cached_eigh(C, CPU)
    (path,) = entries()
    content = bytearray(path.read_bytes())
    if how == "of another":
        cached_eigh(symmetric(seed=1), CPU)
        content = bytearray(next(entry for entry in entries() if entry != path).read_bytes())
    elif how == "flipped":
        content[-1001] ^= 0x40  # the highest byte of a number
    else:
        content = bytearray((2).to_bytes(8, "little") + b"{}")
    path.write_bytes(content)
    before = len(computed)
    for _ in range(2):
        assert all(map(torch.equal, cached_eigh(C, CPU), expected))
    assert len(computed) == before + 1, "computed anew, and kept"


def test_a_cache_that_cannot_be_written_costs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (taken := tmp_path / "taken").write_text("")
    monkeypatch.setenv("FFEDIT_CACHE", str(taken))
    values, _ = cached_eigh(symmetric(), CPU)
    assert len(values) == 24


def test_the_device_of_the_layer_computes_where_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.device, int]] = []

    def solve_device(device: torch.device, numbers: int) -> torch.device:
        asked.append((device, numbers))
        return CPU

    monkeypatch.setattr(statistics, "solve_device", solve_device)
    cached_eigh(symmetric(10), torch.device("cuda", 1))
    assert asked == [(torch.device("cuda", 1), 6 * 10**2)], "its workspace"
    editable = zoo.build("gpt2", True)
    collect(editable, [editable.memories[layer] for layer in (0, 2)], CORPUS)
    assert asked[1:] == [(CPU, 3 * editable.memories[0].d_ff ** 2)] * 2, "so does the ridge"
