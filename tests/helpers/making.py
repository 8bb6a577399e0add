"""What the tests of the exporter share: edits by hand, models on disk, refusals, verification without a new process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from safetensors.torch import load_file
from shell import disk

import ffedit
from ffedit import CheckError, Edit, EditError, Fact, LowRank
from ffedit.algebra.low_rank import Dense, Update
from ffedit.editor.provenance import dtypes
from ffedit.exporter import subprocess_check, verification
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import Address, identity

FACT = Fact("Eiffel tower", "the {} is located in", "Rome", "Paris")
SECOND = Fact("Marie Curie", "{} stands in", "Spain", "France")


def made(
    editable: Editable,
    ranks: Mapping[int, int] | Mapping[Address, int],
    fact: Fact = FACT,
    seed: int = 0,
    dense: bool = False,
    size: float = 0.1,
) -> Edit:
    """A random edit of some layers, or experts, as an editor would give it."""
    generator = torch.Generator().manual_seed(seed)
    updates: dict[Address, Update] = {}
    for place, rank in ranks.items():
        at = Address(place) if isinstance(place, int) else place
        rows, columns = editable.memories[at].value.shape
        left, right = (
            size * torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((rows, rank), (rank, columns))
        )
        updates[at] = Dense(left @ right) if dense else LowRank(left, right)
    memories = {at: editable.memories[at] for at in updates}
    about = {
        "method": "random",
        "model": editable.name,
        "base": fingerprint(editable),
        **dtypes(next(iter(memories.values()))),
        "layers": sorted({at.layer for at in updates}),
        "matrices": {str(at): identity(memory) for at, memory in memories.items()},
    }
    return Edit(updates, {}, {}, (fact,), about)


def on_disk(family: str, folder: Path, dtype: torch.dtype = torch.float32, shards: str = "20KB") -> Path:
    """A random model of several shards, and its tokenizer."""
    editable = zoo.build(family, True, dtype)
    editable.model.save_pretrained(folder, max_shard_size=shards)
    editable.tokenizer.save_pretrained(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two checkpoints are equal, bit for bit."""
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def written_by_hand(base: Mapping[str, torch.Tensor], editable: Editable, *edits: Edit) -> dict[str, torch.Tensor]:
    """The base's tensors with edits added one after the other, each sum rounded once to the base's dtype."""
    expected = dict(base)
    for edit in edits:
        for at, update in edit.updates.items():
            memory = editable.memories[at]
            delta = update.dense.T if memory.stored_transposed else update.dense
            old = expected[memory.parameter]
            expected[memory.parameter] = (old.double() + delta).to(old.dtype)
    return expected


def check_here(task: subprocess_check.Task) -> subprocess_check.Checked:
    """`check_fresh` without its process, which takes seconds to start."""
    transformers.utils.logging.disable_progress_bar()
    try:
        return verification.CHECKS[task.kind](task)
    except CheckError as error:
        raise CheckError(f"{error}; nothing was written") from error


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 in several shards; read only."""
    return on_disk("gpt2", tmp_path_factory.mktemp("shipping") / "gpt2")


@pytest.fixture(scope="module")
def editable(base: Path) -> ffedit.Editable:
    """The same, loaded; read only."""
    return ffedit.load(base)


@pytest.fixture
def edit(editable: ffedit.Editable) -> Edit:
    return made(editable, {1: 2})


def refused(*arguments: Any, error: type[Exception] = EditError, **options: Any) -> str:
    """What `export` says when it refuses; nothing is left beside the target then."""
    target = Path(arguments[2])
    before = disk(target.parent)
    with pytest.raises(error) as caught:
        ffedit.export(*arguments, **options)
    assert "\n" not in str(caught.value) and disk(target.parent) == before
    return str(caught.value)
