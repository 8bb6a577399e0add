"""The notebook of the documentation runs, and gives the numbers that are stored in it."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


@pytest.mark.usefixtures("warm_cache")
def test_the_notebook_runs_and_shows_each_result_once(tmp_path: Path) -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    again = nbformat.from_dict(stored)
    # What a cell prints may come in several messages on a busy machine, and is one output all the same.
    settings = {"timeout": 300, "coalesce_streams": True, "resources": {"metadata": {"path": str(tmp_path)}}}
    nbclient.NotebookClient(again, **settings).execute()
    kinds: set[str] = set()
    for cell in (cell for cell in again.cells if cell.cell_type == "code"):
        shown = [output for output in cell.outputs if output.get("name") != "stderr"]
        assert len(shown) <= 1, cell.source
        kinds.update(*(output.get("data", {}) for output in shown))
    assert {"text/html", "image/png"} <= kinds
    assert (tmp_path / "rome-tower" / "model.safetensors").is_file()
    says = [cell.outputs[0].data["text/html"] for cell in stored.cells if "to_frame" in cell.source]
    assert says and "Rome." in says[0] and "Paris." in says[0]
