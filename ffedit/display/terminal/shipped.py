"""Show the result of an export, and how a GGUF file stores an edit, as lines in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.filesize import decimal
from rich.text import Text

from ffedit.editor.edit import Edit
from ffedit.exporter import Exported
from ffedit.facts.text import counted


def shipped(done: Exported, undone: bool = False) -> Text:
    """Render the folder written, the bytes rewritten, copied and linked, and the check in a fresh process."""
    what = f"edit {done.edit.fingerprint()} undone, bit for bit" if undone else "written"
    lines = [f"{done.folder}: {what}"]
    if done.moved is not None:
        rewritten, copied, linked = map(decimal, (done.moved.rewritten, done.moved.copied, done.moved.linked))
        lines.append(f"{rewritten} of weights rewritten; files of {copied} copied, {linked} linked")
    lines += [_as_stored(matrix.to_dict()) for matrix in done.packed]
    logits = ", logits" if done.checked.logits else " (logits not compared)"
    lines.append(f"verified in a fresh process: {counted(done.checked.tensors, 'tensor')}{logits}")
    if done.checked.peft is False:
        lines.append("not tried with PEFT, which is not installed (pip install 'ffedit[peft]')")
    return Text("\n".join(lines))


def packing(edit: Edit) -> Text | None:
    """Render how a GGUF file stores an edit whose stored form was measured; None for any other edit."""
    lines = [_as_stored(matrix) for matrix in edit.provenance.get("gguf", ())]
    note = "The scores are measured on the matrices as the file stores them."
    return Text("\n".join([*lines, note])) if lines else None


def _as_stored(matrix: Mapping[str, Any]) -> str:
    """Describe how a GGUF file stores a changed matrix (`Packed.to_dict`)."""
    kind = matrix["kind"] if matrix["kind"] == matrix["was"] else f"{matrix['kind']} (was {matrix['was']})"
    return f"{matrix['name']} is stored as {kind}, which loses {matrix['lost']:.1%} of the edit"
