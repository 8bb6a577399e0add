"""The folder of `ffedit inspect model`: the corpus pass, and the report as JSON, Markdown and figure."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from ffedit.display.figures.plots import report_panels
from ffedit.display.figures.saving import save_figure
from ffedit.display.terminal import model_view
from ffedit.errors import EditError
from ffedit.files.atomic import check_free, write_text
from ffedit.files.placing import LOCK, claimed
from ffedit.inspector.memory_pass import FILE
from ffedit.inspector.model_view import ModelReport

OURS = (FILE, "rows-*.safetensors", "report.json", "report.md", "report.png")


def prepare(folder: Path, force: bool) -> None:
    """Accept a folder that can be created, or one that holds a pass; with `force`, delete that pass.

    Raises:
        EditError: the folder holds other files, cannot be written, or is in use by another process.
    """
    if not folder.exists():
        check_free(folder, force)
        return
    try:
        others = folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())
        if others and not (folder / FILE).exists() and not any(folder.glob("rows-*.safetensors")):
            raise EditError(f"{folder}: holds other things; name a new folder, or that of a pass to go on with it")
        with claimed(folder):
            for pattern in OURS if force else ():
                for path in folder.glob(pattern):
                    path.unlink()
            (probe := folder / ".writable").touch()
            probe.unlink()
    except OSError as error:
        raise EditError(f"{folder}: cannot be written ({error.strerror})") from error


def write_report(folder: Path, report: ModelReport) -> list[Path]:
    """Write the report as JSON, as Markdown, and as a figure where matplotlib is installed; return their paths."""
    written = [folder / "report.json", folder / "report.md"]
    write_text(written[0], json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n")
    write_text(written[1], model_view.markdown(report) + "\n")
    if find_spec("matplotlib") is not None:
        written.append(save_figure(folder / "report.png", lambda: report_panels(report)))
    return written
