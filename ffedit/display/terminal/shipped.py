"""The result of an export in a few lines."""

from __future__ import annotations

from rich.text import Text

from ffedit.exporter import Exported


def shipped(done: Exported, undone: bool = False) -> Text:
    """Render the folder written, the bytes rewritten, copied and linked, and the check in a fresh process."""
    lines = [f"{done.folder}: {'edit ' + done.edit.fingerprint() + ' undone' if undone else 'written'}"]
    if undone:
        lines[0] += ", bit for bit" if done.exact else " by subtraction: not exactly what it was"
    if done.moved is not None:
        moved = done.moved
        lines.append(
            f"{_size(moved.rewritten)} of weights rewritten; files of {_size(moved.copied)} copied, "
            f"{_size(moved.linked)} linked"
        )
    checked = done.checked
    what = f"{checked.tensors} tensor{'' if checked.tensors == 1 else 's'}"
    lines.append(f"verified in a fresh process: {what}{', logits' if checked.logits else ' (logits not compared)'}")
    if checked.peft is False:
        lines.append("not tried with PEFT, which is not installed (pip install 'ffedit[peft]')")
    return Text("\n".join(lines))


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
