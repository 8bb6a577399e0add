"""Export an edit, and undo one in a checkpoint; a fresh process verifies both before they count as done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from ffedit.algebra.low_rank import Dense
from ffedit.editor.edit import Edit, check_edit, refuse_shared
from ffedit.editor.edit_files import EDITS
from ffedit.errors import EditError, ModelError, choices
from ffedit.exporter import gguf
from ffedit.exporter.adapter import write_adapter
from ffedit.exporter.checkpoint import (
    Moved,
    export_plan,
    is_of_edited_base,
    is_on_disk,
    named_as_in,
    rewrite,
    save_expected,
    write_from_memory,
)
from ffedit.exporter.embedded_edits import embed, history, load_with_edits, plan_undo, read_originals
from ffedit.exporter.gguf import Packed, pack, source_file, write_gguf
from ffedit.exporter.model_card import adapter_card, model_card, origin_of, undone_card
from ffedit.exporter.subprocess_check import Checked, Task, check_fresh
from ffedit.files.atomic import behind_links, check_free, written
from ffedit.files.placing import named_errors, placed
from ffedit.files.shards import gguf_parts
from ffedit.files.tensor_ranges import Matrix, contents
from ffedit.loading.load import (
    cached_folder,
    decoder_classes,
    local_folder,
    quantisation,
    stored_folder,
    written_config,
)
from ffedit.loading.names import gguf_file
from ffedit.model.editable import Editable
from ffedit.model.memory import identity
from ffedit.notebook import Displayed

Format: TypeAlias = Literal["checkpoint", "adapter", "gguf"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True)
class Exported(Displayed):
    """Result of an export or of an undo.

    Attributes:
        folder: the folder written, or the GGUF file.
        moved: bytes linked, copied and rewritten; None where no checkpoint was made from the base's files.
        checked: the comparisons that a fresh process made.
        edit: the edit that was exported or undone.
        packed: for a GGUF file, the matrices as stored in it.
    """

    folder: Path
    moved: Moved | None
    checked: Checked
    edit: Edit
    packed: tuple[Packed, ...] = ()

    def __repr__(self) -> str:
        equal = f"{self.checked.tensors} tensors{' and logits' if self.checked.logits else ''}"
        return f"Exported({str(self.folder)!r}, edit {self.edit.fingerprint()}, verified: {equal})"


def export(
    model: Editable | str | Path,
    edit: Edit,
    out: str | Path,
    *,
    force: bool = False,
    format: Format | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write an edit as a checkpoint that transformers loads, as a LoRA adapter, or as a GGUF file.

    A checkpoint is made from the base's files: unchanged shards are linked, changed matrices are rewritten a block of
    rows at a time, and no model is loaded. It keeps these matrices from before the edit, for `undo`. A model whose
    weights are not on disk, or in a GGUF file, is written from memory. A GGUF file is made from the one that the model
    was loaded from (`ffedit.exporter.gguf`).

    Before the result counts as done, a fresh process compares its tensors with the intended ones, and its logits if the
    weights take less than half of the free memory.

    Args:
        model: the unedited model that the edit was computed on: loaded, or named as for `load`.
        edit: the edit to write.
        out: the folder, or GGUF file, to make, atomically.
        force: replace an existing folder or file.
        format: "checkpoint", "adapter" (a folder for PEFT, or, where `out` ends in .gguf, a file for llama.cpp)
            or "gguf"; None: "gguf" where `out` ends in .gguf, else "checkpoint".
        revision: branch, tag or commit where `model` is a hub id.
        trust_remote_code: run code that comes with the checkpoint when it is loaded, if quantised, and verified.

    Returns:
        The folder, and what was rewritten and verified.

    Raises:
        ModelError: the base cannot be found or read, or its weights are pickled.
        EditError: the folder exists, is the base's own or cannot be written, or the edit is another base's or does
            not fit the format.
        CheckError: the verification failed; nothing is left then.
    """
    check_edit(edit)
    ModelError.require(model, (Editable, str, Path), "the base was expected: a loaded model, or its name or folder")
    format = format or ("gguf" if Path(out).suffix == ".gguf" else "checkpoint")
    if format not in FORMATS:
        raise EditError(f"format {format!r} is not known; give {choices(format, FORMATS)}")
    check_free(Path(out), force, folder=format == "checkpoint")
    as_gguf = format == "gguf" or (format == "adapter" and Path(out).suffix == ".gguf")
    base = find_base(model, edit, revision, files=not as_gguf and format != "checkpoint", trusted=trust_remote_code)
    if as_gguf:
        return _export_gguf(base, Path(out), format, force)
    loaded_from = base.folder or (cached_folder(base.editable) if base.editable is not None else None)
    refuse_source(Path(out), loaded_from, "the model was loaded from this folder")
    if format == "checkpoint" and base.editable is not None:
        for address in edit.updates:
            base.editable.memories[address].check_writable()
    with written(Path(out), force) as folder:
        moved = _write(base, loaded_from, folder, format)
        base_folder = str(base.folder.absolute()) if base.folder else ""
        task = Task(format, str(folder), base_folder, trust_remote_code=trust_remote_code)
        if base.editable is not None and base.folder is None and format == "checkpoint":
            expected = folder.with_name("expected.safetensors")
            with base.edit.applied(base.editable):
                save_expected(base.editable, expected)
            task = replace(task, kind="memory", base=str(expected))
        checked = check_fresh(task)
    return Exported(Path(out), moved, checked, edit)


def refuse_source(out: Path, source: Path | None, why: str) -> None:
    """Refuse to replace the folder or file that an export or undo reads (EditError)."""
    if source is not None and out.exists() and out.samefile(source):
        raise EditError(f"{out}: {why}, which is never changed; name another")


def _export_gguf(base: Base, out: Path, format: Format, force: bool) -> Exported:
    """Write and verify a GGUF file, a model or an adapter; the verifying process reads the edit from beside it."""
    file = source_file(base.name, base.editable)
    if out.suffix != ".gguf":
        raise EditError(f"{out}: this export is a GGUF file; give it a name that ends in .gguf")
    refuse_source(out, file, "the model was loaded from this file")
    if format == "gguf" and len(gguf_parts(file)) > 1:
        raise EditError(
            f"{file}: is one of several parts, and only a whole file can be edited; join them "
            "(llama-gguf-split --merge), or export an adapter (--format adapter)"
        )
    packed = pack(file, base.edit) if format == "gguf" else {}
    kind = "gguf" if format == "gguf" else "gguf adapter"
    moved: Moved | None = None
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with placed(behind_links(out), force) as made, named_errors(out):
        if format == "gguf":
            moved = write_gguf(file, made, base.edit, packed)
        else:
            gguf.write_adapter(file, made, base.edit)
        base.edit.save(made.parent / EDITS / "000")
        checked = check_fresh(Task(kind, str(made), str(file.absolute())))
    return Exported(out, moved, checked, base.edit, packed=tuple(packed.values()))


def _write(base: Base, loaded_from: Path | None, folder: Path, format: Format) -> Moved | None:
    """Write an export into an empty folder, with its model card and the edits; return the bytes moved."""
    moved, origin = None, origin_of(base.name, loaded_from, base.edit.provenance.get("source"))
    earlier: tuple[Edit, ...] = ()
    originals: dict[str, Matrix] = {}
    if format == "adapter":
        write_adapter(folder, origin.name, base.edit, base.revision, base.is_mixture)
    elif base.folder is None:
        assert base.editable is not None
        earlier, originals = write_from_memory(base.editable, base.edit, folder)
    else:
        tensors = contents(base.folder)
        plan = export_plan(tensors, base.edit)
        moved = rewrite(base.folder, tensors, plan, folder)
        earlier, stored = history(base.folder), read_originals(base.folder)
        changed_before = {name for other in earlier for name in export_plan(tensors, other)}
        stored |= {name: tensors[name] for name in plan if name not in changed_before}
        originals = {name: matrix.matrix() for name, matrix in stored.items()}
    edits = (*earlier, base.edit.noted(model=origin.name))
    if format == "adapter":
        card = adapter_card(origin, base.edit, decoder_classes(base.config)[0].__name__)
    else:
        card = model_card(origin, edits)
    embed(folder, edits, originals)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return moved


def packed_edit(editable: Editable, edit: Edit) -> Edit:
    """Return an edit as a GGUF file would hold it, to be measured before it is exported (errors as of `export`).

    In it W' − W is in place of Δ, and the types of the tensors are in the provenance.
    """
    base = find_base(editable, edit)
    packed = pack(source_file(base.name, base.editable), base.edit)
    changes = {at: Dense(matrix.change) for at, matrix in packed.items()}
    return replace(edit, updates=changes).noted(gguf=[matrix.to_dict() for matrix in packed.values()])


def undo(
    checkpoint: str | Path,
    out: str | Path,
    *,
    edit: int | str | None = None,
    force: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write a checkpoint without one of its edits.

    Args:
        checkpoint: folder or hub id of a checkpoint that `export` made.
        out: the folder to make, atomically.
        edit: number (0 is the oldest) or fingerprint; None: the last.
        force: replace an existing folder.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run code that comes with the checkpoint when it is verified.

    Returns:
        The folder, what was rewritten and verified, and the undone edit.

    Raises:
        ModelError: the checkpoint cannot be found or read.
        EditError: there is no such edit in it, the originals are missing or do not lead to its weights, or the folder
            exists, is the checkpoint's own or cannot be written.
        CheckError: the verification failed; nothing is left then.
    """
    check_free(Path(out), force, folder=True)
    base = local_folder(checkpoint, revision)
    refuse_source(Path(out), base, "the edit is undone in a copy of this checkpoint")
    which = None if edit is None else str(edit)
    undoing = plan_undo(base, which)
    with written(Path(out), force) as folder:
        moved = rewrite(base, undoing.tensors, undoing.plan, folder)
        embed(folder, undoing.left, {name: stored.matrix() for name, stored in undoing.originals.items()})
        origin = origin_of(str(checkpoint), base, undoing.edit.provenance.get("source"))
        card = undone_card(origin, undoing.edit, undoing.left)
        (folder / "README.md").write_text(card, encoding="utf-8")
        task = Task("undo", str(folder), str(base.absolute()), which, trust_remote_code)
        checked = check_fresh(task)
    return Exported(Path(out), moved, checked, undoing.edit)


class Base(NamedTuple):
    """Base model of an export: its name, the edit with `provenance["matrices"]`, and where the weights are."""

    name: str
    edit: Edit
    folder: Path | None  # None: the weights are in memory only
    config: Any
    is_mixture: bool  # some of its layers have experts
    editable: Editable | None = None
    revision: str | None = None


def find_base(
    model: Editable | str | Path, edit: Edit, revision: str | None = None, files: bool = False, trusted: bool = False
) -> Base:
    """Find the base, on disk if it is there, and check that the edit was computed on it and is not in it already.

    The weights of a GGUF file are read into memory, in the precision that the edit was computed in. With `files` they
    are converted into files instead, with which a fresh process compares an adapter. If `trusted`, a quantised
    checkpoint is loaded with its code.
    """
    if isinstance(model, Editable):
        edit.check(model)
        folder = stored_folder(model, convert=files)
        if folder is not None:
            stored = [other.fingerprint() for other in history(folder)]  # a sample may miss the changes of a small edit
            if stored != list(model.history.known) or not is_on_disk(model, folder):
                folder = None
        if "matrices" not in edit.provenance:
            edit = edit.noted(matrices={str(at): identity(model.memories[at]) for at in edit.updates})
        is_mixture = any(layer.mixture is not None for layer in model.feed_forward)
        return Base(model.name, edit, folder, model.model.config, is_mixture, model, revision)
    if not files and gguf_file(str(model)) is not None and edit.computed_in in (torch.float32, torch.bfloat16):
        return find_base(load_with_edits(model, device="cpu", dtype=edit.computed_in, revision=revision), edit)
    folder = local_folder(model, revision)
    config = written_config(folder)
    if quantisation(config):
        # Quantised files are not rewritten; transformers may unpack them to 16 bits (FP8, MXFP4).
        loaded = load_with_edits(model, revision=revision, trust_remote_code=trusted)
        return find_base(loaded, edit, revision)
    earlier = history(folder)
    if edit.fingerprint() in [other.fingerprint() for other in earlier]:
        raise EditError(f"{model}: holds the edit {edit.fingerprint()} already; nothing was written")
    tensors = contents(folder)
    if not is_of_edited_base(edit, tensors, read_originals(folder), str(model)):
        refuse_shared([fact for other in earlier for fact in other.facts], edit.facts)
    is_mixture = any(".experts." in name for name in tensors)
    return Base(str(model), named_as_in(tensors, edit), folder, config, is_mixture, revision=revision)
