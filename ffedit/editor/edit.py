"""An edit is a value: low-rank factors, the facts they store, and how they were found.

Nothing in a model has changed until it is applied. Undoing keeps the original weights and puts them back;
subtracting Δ would not do (W + Δ − Δ ≠ W in 16 bits).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ffedit.algebra import double
from ffedit.anatomy import Editable
from ffedit.errors import EditError, FactError
from ffedit.facts import Fact
from ffedit.fingerprint import fingerprint
from ffedit.folders import written
from ffedit.lowrank import LowRank
from ffedit.memory import Address

FORMAT = 1


class HasScores(Protocol):
    """Scores as plain numbers by name."""

    def to_dict(self) -> dict[str, float | None]:
        """The scores."""
        ...


class Scored(Protocol):
    """A report of what was measured before and after an edit."""

    @property
    def before(self) -> HasScores:
        """Scores of the unedited model."""
        ...

    @property
    def after(self) -> HasScores | None:
        """Scores of the edited model."""
        ...


@dataclass(frozen=True, eq=False)
class Edit:
    """Changes of value matrices that store facts.

    Attributes:
        updates: Δ per memory, factors [d_model, r] and [r, d_ff], float64.
        keys: the keys solved for, per memory, [d_ff, n].
        values: the values they are to give, per memory, [d_model, n].
        facts: what was written, in order.
        provenance: method, model, seeds, contexts, statistics, versions; plain JSON.
    """

    updates: Mapping[Address, LowRank]
    keys: Mapping[Address, Tensor]
    values: Mapping[Address, Tensor]
    facts: tuple[Fact, ...]
    provenance: Mapping[str, Any]

    @property
    def layers(self) -> list[int]:
        """The layers that change."""
        return sorted({address.layer for address in self.updates})

    @property
    def rank(self) -> int:
        """Rank of the largest update, at most the number of facts."""
        return max((delta.rank for delta in self.updates.values()), default=0)

    @property
    def base(self) -> str:
        """Fingerprint of the model that the edit was computed on."""
        return str(self.provenance["base"])

    def fingerprint(self) -> str:
        """16 hexadecimal digits over factors and facts."""
        digest = hashlib.sha256(json.dumps([fact.to_dict() for fact in self.facts]).encode())
        for address, delta in sorted(self.updates.items()):
            digest.update(f"{address}".encode())
            digest.update(delta.left.cpu().contiguous().numpy().tobytes())
            digest.update(delta.right.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def norm_ratio(self, editable: Editable) -> float:
        """Largest ‖Δ‖ / ‖W‖ (Frobenius) over the memories that change."""
        return max(
            delta.norm() / float(editable.memories[address].value.double().norm())
            for address, delta in self.updates.items()
        )

    def scored(self, report: Scored) -> Edit:
        """The same edit, with the scores that were measured before and after it in its provenance."""
        scores = {"before": report.before.to_dict(), "after": report.after.to_dict() if report.after else None}
        return replace(self, provenance={**self.provenance, "scores": scores})

    def apply_(self, editable: Editable) -> None:
        """Write the edit into the model, in place.

        Raises:
            EditError: the model is not the one that the edit was computed on (an edit applied twice is such a case), or
                the edited weights would not be finite; nothing has changed then.
        """
        self._check(editable)
        for address, delta in self.updates.items():
            editable.memories[address].write_(delta)

    @contextmanager
    def applied(self, editable: Editable) -> Iterator[None]:
        """The edited model for the length of a block; afterwards the weights are what they were, bit for bit.

        Raises:
            EditError: as `apply_`.
        """
        self._check(editable)
        kept = {address: editable.memories[address].value.clone() for address in self.updates}
        try:
            for address, delta in self.updates.items():
                editable.memories[address].write_(delta)
            yield
        finally:
            for address, original in kept.items():
                editable.memories[address].value.copy_(original)

    def _check(self, editable: Editable) -> None:
        for address, delta in self.updates.items():
            if address not in editable.memories or editable.memories[address].value.shape != delta.shape:
                raise EditError(
                    f"the edit changes a value matrix {list(delta.shape)} in layer {address}, which {editable.name} "
                    "does not have; apply it to the model it was made for"
                )
            memory = editable.memories[address]
            total = double(memory.value) + delta.dense.to(memory.value.device)
            # Not "any above": NaN is not above anything.
            if not float(total.abs().max()) <= torch.finfo(memory.saved_dtype).max:
                raise EditError(
                    "the edit holds NaN, infinity or numbers too large for the weights; nothing was written"
                )
        found = fingerprint(editable)
        if found != self.base:
            raise EditError(
                f"the edit was computed on weights {self.base}, but {editable.name} has {found} (another model, "
                "another dtype, or edited already); load the model it was made for"
            )

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write a folder of `edit.safetensors` and `manifest.json`, whole or not at all.

        Raises:
            EditError: the folder exists (without `force`) or cannot be written.
        """
        with written(Path(path), force) as folder:
            self._write(folder)

    def _write(self, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for address, delta in self.updates.items():
            tensors |= {f"{address}/left": delta.left, f"{address}/right": delta.right}
            tensors |= {f"{address}/keys": self.keys[address], f"{address}/values": self.values[address]}
        try:
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "edit.safetensors"
            )
        except SafetensorError as error:
            raise OSError(str(error)) from error
        manifest = {
            "format": FORMAT,
            "fingerprint": self.fingerprint(),
            "facts": [fact.to_dict() for fact in self.facts],
            "provenance": dict(self.provenance),
        }
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        (folder / "manifest.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Edit:
        """Read what `save` wrote.

        Raises:
            EditError: there is no edit, or it is damaged, changed by hand, or of another format.
        """
        folder = Path(path)
        if not (folder / "manifest.json").is_file():
            raise EditError(f"{folder}: holds no edit (manifest.json and edit.safetensors were expected)")
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise EditError(f"{folder}: an edit of format {manifest['format']}; this version reads {FORMAT}")
            with safe_open(folder / "edit.safetensors", framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            addresses = {name.split("/")[0] for name in tensors}
            updates, keys, values = {}, {}, {}
            for text in addresses:
                layer, _, expert = text.partition(".")
                address = Address(int(layer), int(expert) if expert else None)
                updates[address] = LowRank(tensors[f"{text}/left"], tensors[f"{text}/right"])
                keys[address], values[address] = tensors[f"{text}/keys"], tensors[f"{text}/values"]
            facts = tuple(Fact.from_dict(fact) for fact in manifest["facts"])
            edit = cls(dict(sorted(updates.items())), keys, values, facts, manifest["provenance"])
            expected, _ = manifest["fingerprint"], edit.base
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, FactError) as error:
            raise EditError(f"{folder}: the edit is damaged or foreign ({error}); make it anew") from error
        if edit.fingerprint() != expected:
            raise EditError(f"{folder}: factors or facts were changed after the edit was saved; make it anew")
        return edit
