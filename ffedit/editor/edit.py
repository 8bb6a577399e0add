"""An edit as an immutable value: changes of value matrices, the facts they store, and how they were computed.

The model is unchanged until an edit is applied, and undoing restores the original weights
(`ffedit.model.editable`). Edits of the same weights can be added. On disk an edit is a folder: `edit.safetensors`
holds every number exactly, `manifest.json` describes them (`ffedit.editor.edit_files`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import Dense, LowRank, Update
from ffedit.algebra.rounding import rounded
from ffedit.editor.edit_files import FORMAT, MANIFEST, TENSORS, check_content, check_edit_folder, checksum
from ffedit.errors import EditError, FactError, brief
from ffedit.facts.fact import Fact, same_question, same_target, show
from ffedit.files.atomic import written
from ffedit.files.tensor_ranges import NAMES
from ffedit.model.editable import Editable, check_model
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.notebook import Displayed

# Number of facts that a printed edit shows.
SHOWN = 3


@dataclass(frozen=True, eq=False)
class Edit(Displayed):
    """Changes of value matrices that store facts.

    Attributes:
        updates: Δ per memory, [d_model, d_ff]; factors in float64, or dense if it comes from fine-tuning.
        keys: the keys solved for, per memory, [d_ff, n]; n = 0 if nothing was solved (fine-tuning).
        values: the target values of the keys, per memory, [d_model, n].
        facts: the facts that were written, in order.
        provenance: method, model, numbers, statistics, versions; plain JSON. `base` is the fingerprint of the weights
            that the edit was computed on, `dtype` the precision of their checkpoint; by address, `matrices` identifies
            the original matrices (`memory.identity`) and `norms` holds their ‖W‖.
    """

    updates: Mapping[Address, Update]
    keys: Mapping[Address, Tensor]
    values: Mapping[Address, Tensor]
    facts: tuple[Fact, ...]
    provenance: Mapping[str, Any]

    def __post_init__(self) -> None:
        shapes = {address: delta.shape for address, delta in self.updates.items()}
        for name, dim in (("keys", 1), ("values", 0)):
            tensors: Mapping[Address, Tensor] = getattr(self, name)
            complete = {at: tensors.get(at, torch.empty(shape[dim], 0)) for at, shape in shapes.items()}
            object.__setattr__(self, name, complete)

    def __repr__(self) -> str:
        provenance = self.provenance
        layers = f"layer{'' if len(self.layers) == 1 else 's'} {', '.join(map(str, self.layers))}"
        norm = f", ‖Δ‖ {provenance['norm_ratio']:.1%} of ‖W‖" if "norm_ratio" in provenance else ""
        method = f"{provenance.get('method')}, {layers}, rank {self.rank}{norm}"
        lines = [f"Edit {self.fingerprint()} of {provenance.get('model')}: {method}"]
        lines += [f"{fact.text} → {fact.target}" for fact in self.facts[:SHOWN]]
        lines += [f"… and {len(self.facts) - SHOWN} more"] if len(self.facts) > SHOWN else []
        return "\n  ".join(lines)

    @property
    def base(self) -> str:
        """Fingerprint of the model that the edit was computed on."""
        return str(self.provenance["base"])

    @property
    def in_chat(self) -> bool:
        """True if all of the edit was computed inside the model's chat template."""
        parts = self.provenance.get("parts", [self.provenance])  # a sum, which version 0.1.0 could write, has several
        return all(part.get("chat", False) for part in parts)

    @property
    def says(self) -> list[tuple[str | None, str | None]]:
        """Answers of the model to each fact's prompt, without the edit and with it; None where it was not measured."""
        answers = self.provenance.get("says", {})
        before, after = (answers.get(side) or [None] * len(self.facts) for side in ("before", "after"))
        return list(zip(before, after, strict=True))

    @property
    def layers(self) -> list[int]:
        """Return the layers that change."""
        return sorted({address.layer for address in self.updates})

    @property
    def rank(self) -> int:
        """Rank of the largest update, at most the number of facts."""
        return max((delta.rank for delta in self.updates.values()), default=0)

    @property
    def size(self) -> int:
        """Size in bytes of all tensors: changes, keys and values."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self._tensors())

    def fingerprint(self) -> str:
        """Hash changes, keys, values and facts to 16 hexadecimal digits: the edit's identity, also after `scored`."""
        hashed = hashlib.sha256(json.dumps([fact.to_dict() for fact in self.facts]).encode())
        for name, tensor in sorted(self._tensors(), key=lambda pair: pair[0]):
            hashed.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
            content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)  # numpy has no bfloat16
            hashed.update(content.numpy().data)
        return hashed.hexdigest()[:16]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by their names on disk: "4/left", or "4.7/keys" for expert 7 of layer 4."""
        for at, delta in self.updates.items():
            for name, tensor in {**vars(delta), "keys": self.keys[at], "values": self.values[at]}.items():
                yield f"{at}/{name}", tensor

    def subjects(self, at: Address) -> list[str]:
        """Return the subject of each column of `keys[at]`."""
        return list(self.provenance.get("subjects", {}).get(str(at), []))

    @property
    def computed_in(self) -> torch.dtype | None:
        """Precision of the weights that the edit was computed with; None if not recorded."""
        return getattr(torch, str(self.provenance.get("computed_in")), None)

    def norms(self) -> dict[Address, float]:
        """Compute ‖Δ‖ (Frobenius) per memory."""
        return {address: delta.norm() for address, delta in self.updates.items()}

    def scored(self, report: Any) -> Edit:
        """Return the same edit with the scores, answers and verdict of a `Report` in its provenance."""
        scores = {"before": report.before.to_dict(), "after": report.after.to_dict() if report.after else None}
        says = {}
        for side, measured in (("before", report.facts_before), ("after", report.facts_after)):
            answers = {score.fact.text: score.says for score in measured or ()}
            says[side] = [answers.get(fact.text) for fact in self.facts]
        return self.noted(scores=scores, says=says, verdict=report.verdict.to_dict())

    def noted(self, **notes: Any) -> Edit:
        """Return the same edit with `notes` added to its provenance: plain JSON, such as `warnings`."""
        return replace(self, provenance={**self.provenance, **notes})

    def apply_(self, editable: Editable) -> None:
        """Write the edit into the model, in place; `undo_` removes it.

        The edit must have been computed on the current weights, or on the weights before the edits that are applied; it
        is then added to those edits. Each addition is rounded to the weights' precision.

        Raises:
            EditError: the edit is applied already or does not fit, the model is not the one it was computed on, or the
                edited weights would not be finite; nothing is changed then.
        """
        weights = self.check(editable)
        for address in self.updates:
            editable.memories[address].check_writable()
        editable.history.apply_(editable.memories, self.fingerprint(), self, weights)

    def undo_(self, editable: Editable) -> None:
        """Remove the edit from the model, in place and in any order, bit for bit as if it had never been applied.

        Anything written into these matrices since, other than by ffedit, is lost.

        Raises:
            EditError: the edit is not applied, or the originals of the matrices it changed are missing.
        """
        check_model(editable)
        name = self.fingerprint()
        if name in editable.history.lasting:
            raise EditError(
                f"the edit {name} cannot be undone in {editable.name}: the original matrices are missing; load the "
                "base, or a checkpoint with its originals"
            )
        if name not in editable.history.edits:
            applied = ", ".join(editable.history.edits) or "none"
            raise EditError(f"the edit {name} is not applied to {editable.name} (applied: {applied}); nothing to undo")
        editable.history.undo_(editable.memories, name)

    @contextmanager
    def applied(self, editable: Editable) -> Iterator[Editable]:
        """Apply the edit within a block, and yield the model; afterwards the weights are restored bit for bit.

        In a quantised model the edit is computed beside the weights, like an adapter. Errors are those of `apply_`.
        """
        check_model(editable)
        if any(at in editable.memories and editable.memories[at].quantised for at in self.updates):
            self.check(editable)
            with ExitStack() as stack:
                for at, delta in self.updates.items():
                    stack.enter_context(editable.memories[at].beside(delta))
                yield editable
            return
        self.apply_(editable)
        try:
            yield editable
        finally:
            self.undo_(editable)

    def weights(self, editable: Editable) -> dict[KeyValueMemory, nn.Parameter] | None:
        """Copy the edited value matrices of a model that the edit is applied to, as parameters of their modules.

        None where no matrix is edited, or one has no parameter of its own: of an expert, quantised, or offloaded.
        """
        memories = [editable.memories[at] for at in self.updates]
        shared = (memory.quantised or memory.slot is not None or memory.weight.is_meta for memory in memories)
        if not memories or any(shared):
            return None
        return {memory: nn.Parameter(memory.weight.detach().clone(), requires_grad=False) for memory in memories}

    def check(self, editable: Editable) -> str:
        """Check that the edit may be written into the model; return the fingerprint of its current weights."""
        check_model(editable)
        history, name = editable.history, self.fingerprint()
        if name in history.known:
            raise EditError(f"the edit {name} is applied already to {editable.name}; undo it before applying it again")
        for address, delta in self.updates.items():
            if address not in editable.memories or editable.memories[address].shape != delta.shape:
                raise EditError(
                    f"the edit changes a value matrix {list(delta.shape)} in layer {address}, which {editable.name} "
                    "does not have; apply it to the model it was made for"
                )
            memory = editable.memories[address]
            total = double(memory.value)
            total = total + delta.dense.to(total.device)
            for dtype in dict.fromkeys([memory.saved_dtype, memory.dtype]):
                rounded(total, dtype)
        current = fingerprint(editable)
        if self.base == current:
            return current
        if self.base != base_of(editable):
            raise EditError(
                f"the edit was computed on weights {self.base}, but {editable.name} has {current} (another model, "
                "another dtype, or edited already); load the model it was made for"
            )
        refuse_shared([fact for edit in history.edits.values() for fact in edit.facts], self.facts)
        return current

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write a folder, whole or not at all; EditError where it exists (without `force`) or cannot be written."""
        manifest = {
            "format": FORMAT,
            "fingerprint": self.fingerprint(),
            "facts": [fact.to_dict() for fact in self.facts],
            "provenance": dict(self.provenance),
        }
        manifest["checksum"] = checksum(manifest)
        with written(Path(path), force) as folder:
            # Copies, since safetensors refuses tensors that share memory.
            tensors = {
                name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                for name, tensor in self._tensors()
            }
            save_file(tensors, folder / TENSORS)
            text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
            (folder / MANIFEST).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Edit:
        """Read what `save` wrote; EditError where that is missing, damaged, changed by hand, or of another format."""
        folder = Path(path)
        check_edit_folder(folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise EditError(f"{folder}: an edit of format {show(manifest['format'])}; this version reads {FORMAT}")
            tensors = _read(folder / TENSORS)
            facts, provenance = tuple(Fact.from_dict(fact) for fact in manifest["facts"]), manifest["provenance"]
            check_content(provenance, len(facts), {name: tensor.shape for name, tensor in tensors.items()})
            edit = cls._build(tensors, facts, provenance)
            same_numbers = manifest["fingerprint"] == edit.fingerprint()
            same_manifest = manifest.pop("checksum") == checksum(manifest)
        except (
            *(OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, FactError),
            RecursionError,  # brackets nested thousands deep
        ) as error:
            raise EditError(f"{folder}: the edit is damaged or foreign ({brief(error)}); make it anew") from error
        if not same_numbers:
            raise EditError(f"{folder}: numbers or facts were changed after the edit was saved; make it anew")
        if not same_manifest:
            raise EditError(f"{folder}: {MANIFEST} was changed after the edit was saved; make the edit anew")
        return edit

    @classmethod
    def _build(cls, tensors: Mapping[str, Tensor], facts: tuple[Fact, ...], provenance: Mapping[str, Any]) -> Edit:
        """Build an edit from its tensors by name (`_tensors`)."""
        names = {name.partition("/")[0] for name in tensors}
        updates: dict[Address, Update] = {}
        for at in sorted(Address(*map(int, name.split("."))) for name in names):
            dense = tensors.get(f"{at}/matrix")
            updates[at] = LowRank(tensors[f"{at}/left"], tensors[f"{at}/right"]) if dense is None else Dense(dense)
        keys, values = ({at: tensors[f"{at}/{side}"] for at in updates} for side in ("keys", "values"))
        return cls(updates, keys, values, facts, provenance)


def _read(file: Path) -> dict[str, Tensor]:
    """Read tensors; ValueError where one is not of floats, or `file` is not a file (a link to an endless device)."""
    if not file.is_file():
        raise ValueError(f"no file {file.name}")
    tensors = load(file.read_bytes())
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ValueError(f"{show(name)} is of {tensor.dtype}")
    return tensors


def as_edits(edits: Edit | Iterable[Edit]) -> list[Edit]:
    """Return one edit or several as a list; EditError for anything else."""
    listed = [edits] if isinstance(edits, Edit) or not isinstance(edits, Iterable) else list(edits)
    for edit in listed:
        check_edit(edit)
    return listed


def check_edit(edit: object) -> None:
    """Refuse what is not an edit, such as its path; EditError."""
    EditError.require(edit, Edit, "an edit was expected; ffedit.edit computes one, ffedit.Edit.load reads one")


def applied_edits(editable: Editable) -> tuple[Edit, ...]:
    """Return the edits applied to a model, oldest first."""
    return tuple(editable.history.known.values())


def refuse_shared(facts: Sequence[Fact], others: Sequence[Fact]) -> None:
    """Refuse facts of `others` that are also in `facts`, with the same object or another."""
    joined = [*facts, *others]
    for a, b in ((joined[i], joined[j]) for i, j in same_question(joined) if i < len(facts) <= j):
        if same_target(a, b):
            raise EditError(
                f"both edits contain {show(b.text)} {show(b.new_object)}, so the second would apply it twice; "
                "leave the fact out of one of them"
            )
        raise EditError(
            f"the edits contradict each other: {show(a.text)} gets {show(a.new_object)} from one, {show(b.text)} gets "
            f"{show(b.new_object)} from the other; leave one of the two facts out and compute its edit anew"
        )


def base_of(editable: Editable) -> str:
    """Return the fingerprint of the weights before the edits that are applied and can be undone."""
    history = editable.history
    if history.base == "":
        with unedited(editable):
            history.base = fingerprint(editable)
    return history.base or fingerprint(editable)


@contextmanager
def unedited(editable: Editable) -> Iterator[None]:
    """Put the original of every edited matrix back for the length of a block."""
    originals = {editable.memories[at]: original for at, original in editable.history.originals.items()}
    with restored(list(originals)):
        for memory, original in originals.items():
            memory.set_(original)
        yield


@contextmanager
def restored(memories: Sequence[KeyValueMemory]) -> Iterator[None]:
    """Restore `memories` after the block, bit for bit."""
    writable = [memory for memory in memories if not memory.quantised]
    originals = [memory.value.clone() for memory in writable]
    try:
        yield
    finally:
        for memory, original in zip(writable, originals, strict=True):
            memory.set_(original)
