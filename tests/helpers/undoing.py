"""A state machine of edits: apply, undo, add, combine, save, load, export, undo in a checkpoint, reopen, in any order.

What the weights must be is known without ffedit: the base's matrices with the applied edits added in their order, each
sum in float64 and rounded once to the checkpoint's precision. After every step the bytes of all parameters in memory
are compared with it, and those of every checkpoint when it is written. At the end everything is undone, in memory and
on the disk, and the bytes must be the base's.
"""

from __future__ import annotations

import hashlib
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
import zoo
from families import FAMILIES
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from making import check_here, on_disk, weights
from storing import BARE
from torch import Tensor
from writing import CORPUS, quick

import ffedit
from ffedit import Address, Edit, EditError, Fact, FFEditError, LowRank
from ffedit.algebra.low_rank import Dense, Update
from ffedit.cli import invoke
from ffedit.editor.edit import applied_edits
from ffedit.editor.provenance import dtypes
from ffedit.editor.write import write as write_facts
from ffedit.exporter import history
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import KeyValueMemory, identity

DTYPES = ("float32", "bfloat16", "float16")
SIZES = (1e-5, 0.1, 2.0)
SWITCHES = ("wide", "dense", "fails", "command")
LAYER = 1
PLACES = ("Rome", "Berlin", "Madrid", "France", "Spain")
# Everything that the machines write; it goes when the process ends.
_FOLDER = tempfile.TemporaryDirectory(prefix="ffedit-undo-")
numbers = st.integers(0, 2**16)


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor: unlike an equality of numbers, they tell 0 from −0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def all_bytes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, bytes]]:
    """Dtype and bytes by name."""
    return {name: (tensor.dtype, raw(tensor)) for name, tensor in tensors.items()}


@cache
def base_of(family: str, dtype: str) -> Path:
    """A random model of a family on disk, in shards; read only."""
    return on_disk(family, Path(_FOLDER.name) / f"{family}-{dtype}", getattr(torch, dtype))


def loaded(folder: Path, computed: str) -> Editable:
    """A checkpoint with its edits; in float16, which `load` computes in float32 on a CPU, given as a pair."""
    if computed != "float16":
        return ffedit.load(folder, dtype=computed)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    return ffedit.load((model, zoo.words(True)))


@cache
def unedited(family: str, saved: str, computed: str) -> dict[str, Tensor]:
    """All parameters of a base in memory."""
    return zoo.snapshot(loaded(base_of(family, saved), computed))


class UndoMachine(RuleBasedStateMachine):
    """Edits of one model, of a family and in a precision that are drawn; subclasses name fewer."""

    families: Sequence[str] = tuple(FAMILIES)
    dtypes: Sequence[str] = DTYPES
    most: int = 50  # edits
    counts: ClassVar[dict[str, int]] = {}  # of steps by kind, in all runs of the process

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("FFEDIT_CACHE", str(Path(_FOLDER.name) / "cache"))
        self.patch.setattr("ffedit.exporter.exporting.check_fresh", check_here)
        # No model is loaded for its logits: each step compares all bytes.
        self.patch.setattr("ffedit.exporter.verification.has_room", lambda size: False)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.here = Path(tempfile.mkdtemp(dir=_FOLDER.name))
        self.edits: list[Edit] = []
        self.made_on: dict[str, str] = {}  # what the weights were, by fingerprint of the edit
        self.solved: list[Edit] = []  # those with keys, which `combine` takes
        self.applied: list[Edit] = []
        self.checkpoints: list[tuple[Path, list[Edit]]] = []
        self.subjects = 0

    @initialize(
        family=st.sampled_from(range(2**10)),
        dtype=st.sampled_from(range(3)),
        wide=st.booleans(),
        # The simplest run, which hypothesis tries first, undoes fifty edits.
        most=st.integers(0, 49).map(lambda fewer: 50 - fewer),
        begun=st.integers(0, 50).map(lambda fewer: 50 - fewer),
        order=numbers,
    )
    def open(self, family: int, dtype: int, wide: bool, most: int, begun: int, order: int) -> None:
        """Load the base and apply `begun` edits; `wide` computes in float32; `order` is that of the undoing at last."""
        self.order = order
        self.family = self.families[family % len(self.families)]
        self.dtype = self.dtypes[dtype % len(self.dtypes)]
        self.most = min(most, type(self).most)
        self.base = base_of(self.family, self.dtype)
        self.files = all_bytes(weights(self.base))
        self._load(self.base, "float32" if wide else self.dtype)
        saved = getattr(torch, self.dtype)
        self.originals = {at: memory.value.to(saved, copy=True) for at, memory in self.editable.memories.items()}
        self.make_many(order, begun)

    def teardown(self) -> None:
        """Undo everything, on the disk and in memory, where the run got so far without a failure."""
        try:
            if sys.exc_info()[0] is None:
                self._undo_everything()
        finally:
            self.patch.undo()
            shutil.rmtree(self.here, ignore_errors=True)

    # What is expected ------------------------------------------------------------------------------

    def _load(self, folder: Path, computed: str) -> None:
        self.computed, self.editable = computed, loaded(folder, computed)
        self.applied = list(applied_edits(self.editable))
        self._steps(f"opened, {self.dtype} computed in {computed}")

    def _matrix(self, at: Address, applied: Sequence[Edit]) -> Tensor:
        """W with edits, in the checkpoint's precision."""
        W = self.originals[at]
        for edit in applied:
            if at in edit.updates:
                W = (W.double() + edit.updates[at].dense).to(W.dtype)
        return W

    def _parameters(self, applied: Sequence[Edit], computed: str) -> dict[str, Tensor]:
        """All parameters and buffers of the model in memory; float32 holds 16 bits exactly."""
        expected = dict(unedited(self.family, self.dtype, computed))
        for at, memory in self.editable.memories.items():
            if any(at in edit.updates for edit in applied):
                name, W = f"{memory.name}.{memory.own}", self._matrix(at, applied).to(getattr(torch, computed))
                W = W.T if memory.stored_transposed else W
                if memory.slot is None:
                    expected[name] = W
                else:
                    expected[name] = expected[name].clone()
                    expected[name][memory.slot] = W
        return expected

    def _state(self, applied: Sequence[Edit], computed: str) -> str:
        """What identifies the weights with these edits: equal bytes are equal states."""
        digest = hashlib.sha256(computed.encode())
        for at in sorted(self.originals, key=str):
            digest.update(raw(self._matrix(at, applied)))
        return digest.hexdigest()

    def _fitting(self, applied: Sequence[Edit], *computed: str) -> list[Edit]:
        """The edits that may be added to these: computed on them, or on what was before them and with other facts."""
        computed = computed or (self.computed,)
        here, before = ([self._state(edits, dtype) for dtype in computed] for edits in (applied, ()))
        names = {edit.fingerprint() for edit in applied}
        taken = {fact.subject for edit in applied for fact in edit.facts}

        def fits(edit: Edit) -> bool:
            made_on = self.made_on[edit.fingerprint()]
            apart = not taken & {fact.subject for fact in edit.facts}
            return edit.fingerprint() not in names and (made_on in here or (made_on in before and apart))

        return [edit for edit in self.edits if fits(edit)]

    def _misfit(self, which: int, fitting: Sequence[Edit]) -> Edit | None:
        """One of the other edits, if there are."""
        others = [edit for edit in self.edits if edit not in fitting]
        return others[which % len(others)] if others else None

    def _check_files(self, folder: Path, applied: list[Edit]) -> None:
        """Compare a checkpoint, opened as anybody opens it, with what it must be; remember it."""
        assert [e.fingerprint() for e in history(folder)] == [e.fingerprint() for e in applied]
        opened = transformers.AutoModelForCausalLM.from_pretrained(folder)
        expected = self._parameters(applied, self.dtype)
        assert all_bytes(opened.state_dict()) == all_bytes(expected), "parameters of the checkpoint"
        if not applied:
            assert all_bytes(weights(folder)) == self.files, "files with all edits undone"
        self.checkpoints.append((folder, list(applied)))

    def _refused(self, act: Any) -> None:
        try:
            act()
        except EditError:
            self._steps("refused")
        else:
            raise AssertionError("what does not fit was not refused")

    def _steps(self, kind: str) -> None:
        UndoMachine.counts[kind] = UndoMachine.counts.get(kind, 0) + 1

    def _place(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.here)) / "out"

    # Edits ----------------------------------------------------------------------------------------

    def _keep(self, edit: Edit) -> None:
        self.edits.append(edit)
        self.made_on[edit.fingerprint()] = self._state(self.applied, self.computed)

    def _more(self) -> bool:
        return len(self.edits) < self.most

    @precondition(_more)
    @rule(seed=numbers, size=st.sampled_from(SIZES), spread=st.integers(1, 4), dense=st.booleans())
    def make(self, seed: int, size: float, spread: int, dense: bool) -> None:
        """Random changes of some memories, on the weights as they are; applied at once half of the time."""
        self._make(seed, size, spread, dense and seed % 4 == 0, bool(seed % 2))

    @precondition(_more)
    @rule(seed=numbers, count=st.integers(2, 50))
    def make_many(self, seed: int, count: int) -> None:
        """Many small edits, one on the other."""
        for i in range(min(count, self.most - len(self.edits))):
            self._make(seed + i, SIZES[(seed + i) % 2], 1 + i % 2, False, True)

    def _make(self, seed: int, size: float, spread: int, dense: bool, apply: bool) -> None:
        g = torch.Generator().manual_seed(seed)
        memories = list(self.editable.memories.values())
        chosen = [memories[i] for i in torch.randperm(len(memories), generator=g)[:spread].tolist()]
        updates: dict[Address, Update] = {}
        for memory in sorted(chosen, key=lambda memory: memory.address.layer):
            rank = int(torch.randint(1, 6, (), generator=g))
            left = size * torch.randn(memory.shape[0], rank, generator=g, dtype=torch.float64)
            right = torch.randn(rank, memory.shape[1], generator=g, dtype=torch.float64)
            updates[memory.address] = Dense(left @ right) if dense else LowRank(left, right)
        self.subjects += 1
        fact = Fact(f"subject {self.subjects}", "{} is in", "Rome")
        edit = Edit(updates, {}, {}, (fact,), _about(self.editable, chosen))
        self._keep(edit)
        if apply:
            edit.apply_(self.editable)
            self.applied.append(edit)
        self._steps("made")

    @precondition(lambda self: self._more() and len(self.solved) < len(PLACES))
    @rule()
    def solve(self) -> None:
        """Write one fact by ROME, so that there are keys to combine.

        In 16 bits there may be no solution, and some families' tokenizers split no text by the words of the zoo.
        """
        fact = Fact(f"w{len(self.solved)}", "the {} is located in", PLACES[len(self.solved)])
        try:
            edit = write_facts(self.editable, [fact], "rome", [LAYER], quick(**BARE, steps=1), CORPUS)
        except FFEditError:
            return
        self._keep(edit)
        self.solved.append(edit)
        self._steps("solved")

    @precondition(lambda self: len(self.solved) > 1 and self._more())
    @rule(a=numbers, b=numbers)
    def combine(self, a: int, b: int) -> None:
        """Solve two edits jointly; what comes is as good as any other edit."""
        pair = [self.solved[a % len(self.solved)], self.solved[b % len(self.solved)]]
        names = {edit.fingerprint() for edit in self._fitting(self.applied)}
        if pair[0] is pair[1] or not {edit.fingerprint() for edit in pair} <= names:
            return
        try:
            edit = ffedit.combine(self.editable, pair, "emmet", stats=CORPUS)
        except EditError:
            return
        self._keep(edit)
        self._steps("combined")

    @precondition(lambda self: self.edits)
    @rule(which=numbers)
    def save_and_load(self, which: int) -> None:
        """Keep the edit that is read back instead, here and where it is known as applied."""
        edit = self.edits[which % len(self.edits)]
        folder = self._place()
        edit.save(folder)
        read = Edit.load(folder)
        assert read.fingerprint() == edit.fingerprint() and read.facts == edit.facts
        assert all_bytes(dict(read._tensors())) == all_bytes(dict(edit._tensors()))
        self.edits[which % len(self.edits)] = read
        self._steps("saved and loaded")

    # In memory ------------------------------------------------------------------------------------

    @precondition(lambda self: self.edits)
    @rule(which=numbers)
    def apply(self, which: int) -> None:
        """Apply an edit that fits; one that does not is refused."""
        fitting = self._fitting(self.applied)
        if (misfit := self._misfit(which, fitting)) is not None:
            self._refused(lambda: misfit.apply_(self.editable))
        if fitting:
            edit = fitting[which % len(fitting)]
            edit.apply_(self.editable)
            self.applied.append(edit)
            self._steps("applied")

    @precondition(lambda self: self.applied)
    @rule(which=numbers)
    def undo(self, which: int) -> None:
        """Undo an applied edit, whichever."""
        edit = self.applied.pop(which % len(self.applied))
        edit.undo_(self.editable)
        self._refused(lambda: edit.undo_(self.editable))
        self._steps("undone")

    @precondition(lambda self: self.edits)
    @rule(which=numbers, other=numbers, fails=st.booleans())
    def apply_within(self, which: int, other: int, fails: bool) -> None:
        """Apply an edit for a block, in which another is undone, and which may end in an error."""
        if not (fitting := self._fitting(self.applied)):
            return
        edit = fitting[which % len(fitting)]
        with pytest.raises(ZeroDivisionError), edit.applied(self.editable):
            self._compare([*self.applied, edit])
            if fails and self.applied:
                self.applied.pop(other % len(self.applied)).undo_(self.editable)
                self._compare([*self.applied, edit])
            raise ZeroDivisionError
        self._steps("applied within a block")

    @rule(seed=numbers, size=st.sampled_from([float("nan"), float("inf"), 1e200]))
    def refuse(self, seed: int, size: float) -> None:
        """Refuse what no weight can hold; nothing is changed then."""
        memories = list(self.editable.memories.values())
        memory = memories[seed % len(memories)]
        left = torch.zeros(memory.shape[0], 1, dtype=torch.float64)
        left[seed % len(left)] = size
        delta = LowRank(left, torch.ones(1, memory.shape[1], dtype=torch.float64))
        edit = Edit({memory.address: delta}, {}, {}, (), _about(self.editable, [memory]))
        self._refused(lambda: edit.apply_(self.editable))

    # On the disk ----------------------------------------------------------------------------------

    @precondition(lambda self: self.edits)
    @rule(which=numbers)
    def export(self, which: int) -> None:
        """Write the model in memory with one more edit."""
        fitting = self._fitting(self.applied)
        if (misfit := self._misfit(which, fitting)) is not None:
            self._refused(lambda: ffedit.export(self.editable, misfit, self._place()))
        if not fitting:
            return
        edit = fitting[which % len(fitting)]
        out = ffedit.export(self.editable, edit, self._place()).folder
        self._check_files(out, [*self.applied, edit])
        self._steps("exported from memory")

    @precondition(lambda self: self.edits)
    @rule(which=numbers, onto=numbers)
    def export_from_files(self, which: int, onto: int) -> None:
        """Write a folder, the base or a checkpoint of earlier edits, with one more edit."""
        folders = [(self.base, []), *self.checkpoints]
        folder, held = folders[onto % len(folders)]
        if not (fitting := self._fitting(held, *DTYPES)):
            return
        edit = fitting[which % len(fitting)]
        out = ffedit.export(folder, edit, self._place()).folder
        self._check_files(out, [*held, edit])
        self._steps("exported from files")

    @precondition(lambda self: self.checkpoints)
    @rule(where=numbers, which=numbers, command=st.booleans())
    def undo_on_disk(self, where: int, which: int, command: bool) -> None:
        """Undo an edit of a checkpoint, whichever, by `ffedit undo` or its function."""
        folder, held = self.checkpoints[where % len(self.checkpoints)]
        if not held:
            self._refused(lambda: ffedit.undo(folder, self._place()))
            return
        number = which % len(held)
        self._undo_on_disk(folder, held, number, command)

    def _undo_on_disk(self, folder: Path, held: list[Edit], number: int, command: bool) -> tuple[Path, list[Edit]]:
        out, name = self._place(), held[number].fingerprint()
        if command:
            words = ["undo", str(folder), "--out", str(out), "--edit", name, "--quiet"]
            assert invoke(words) == 0
        else:
            ffedit.undo(folder, out, edit=number)
        self._check_files(out, held[:number] + held[number + 1 :])
        self._steps("undone on disk")
        return self.checkpoints[-1]

    @precondition(lambda self: self.checkpoints)
    @rule(where=numbers, wide=st.booleans())
    def reopen(self, where: int, wide: bool) -> None:
        """Go on with a checkpoint, loaded anew, and the edits that it knows."""
        folder, held = self.checkpoints[where % len(self.checkpoints)]
        self._load(folder, "float32" if wide or self.dtype == "float16" else self.dtype)
        assert [edit.fingerprint() for edit in self.applied] == [edit.fingerprint() for edit in held]

    # Always ---------------------------------------------------------------------------------------

    def _compare(self, applied: Sequence[Edit]) -> None:
        held = all_bytes(self.editable.model.state_dict())
        expected = all_bytes(self._parameters(applied, self.computed))
        differ = [name for name in expected if held[name] != expected[name]]
        assert held.keys() == expected.keys() and not differ, f"{differ} with {len(applied)} edits"

    @invariant()
    def every_byte_is_expected(self) -> None:
        if not hasattr(self, "editable"):
            return
        self._compare(self.applied)
        past = self.editable.history
        assert list(past.edits) == [edit.fingerprint() for edit in self.applied]
        assert past.originals.keys() == {at for edit in self.applied for at in edit.updates}

    def _undo_everything(self) -> None:
        """Undo all edits, of the last checkpoint on the disk and of the model in memory, in an order that is drawn."""
        g = torch.Generator().manual_seed(self.order)
        pick = lambda many: int(torch.randint(len(many), (), generator=g))  # noqa: E731
        if self.checkpoints:
            folder, held = self.checkpoints[pick(self.checkpoints)]
            while held:
                folder, held = self._undo_on_disk(folder, held, pick(held), command=False)
        while self.applied:
            self.applied.pop(pick(self.applied)).undo_(self.editable)
            self._compare(self.applied)
        self._steps(f"ran to the end with {len(self.edits) // 10 * 10} edits or more")


def _about(editable: Editable, memories: Sequence[KeyValueMemory]) -> dict[str, Any]:
    """The provenance of an edit by hand."""
    return {
        "method": "random",
        "model": editable.name,
        "base": fingerprint(editable),
        **dtypes(memories[0]),
        "layers": sorted({memory.address.layer for memory in memories}),
        "matrices": {str(memory.address): identity(memory) for memory in memories},
    }


def walk(machine: UndoMachine, draw: random.Random, steps: int) -> None:
    """Run a machine without hypothesis: each step is drawn evenly from the rules that its state allows."""

    def drawn(rule: Any) -> dict[str, Any]:
        choices = {
            "size": (math.nan, math.inf, 1e200) if rule.__name__ == UndoMachine.refuse.__name__ else SIZES,
            "spread": range(1, 5),
            "count": range(2, 20),
            "most": range(1, 51),
            "begun": range(20),
        }
        names = list(signature(rule).parameters)[1:]
        return {
            name: draw.choice(choices.get(name, (False, True) if name in SWITCHES else range(2**16))) for name in names
        }

    rules = sorted(machine.rules, key=lambda rule: rule.function.__name__)
    try:
        machine.open(**drawn(UndoMachine.open))
        for _ in range(steps):
            allowed = [rule.function for rule in rules if all(holds(machine) for holds in rule.preconditions)]
            step = draw.choice(allowed)
            step(machine, **drawn(step))
            machine.every_byte_is_expected()
    finally:
        machine.teardown()


def undone_checkpoint(family: str, dtype: str) -> Path:
    """A checkpoint that was exported with three edits, one on the other, and undone by three `ffedit undo`."""
    machine = UndoMachine()
    try:
        machine.families, machine.dtypes = (family,), (dtype,)
        machine.open(0, 0, True, 50, 0, 0)
        folder: Path = machine.base
        for i in range(3):
            machine.make(2 * i, SIZES[i % 2], 2, False)
            machine.export_from_files(i, i)
            folder, held = machine.checkpoints[-1]
        assert len(held) == 3
        for number in (1, 0, 0):
            folder, held = machine._undo_on_disk(folder, held, number, command=True)
        kept = Path(tempfile.mkdtemp(dir=_FOLDER.name)) / "undone"
        return Path(shutil.move(folder, kept))
    finally:
        machine.applied.clear()
        machine.checkpoints.clear()
        machine.teardown()
