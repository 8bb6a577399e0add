"""Run the tutorials, as from a clone of the repository.

python tests/helpers/notebooks.py [NAME ...]    runs them all, or those, and stores what they show
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def executed(notebook: Path, clone: Path) -> Any:
    """Run a notebook in `clone`, which gets the files that the tutorials read, and return it with its outputs."""
    shutil.copytree(ROOT / "edits", clone / "edits")
    (here := clone / "docs" / "tutorials").mkdir(parents=True)
    made = nbformat.read(notebook, as_version=4)
    # What a cell prints may come in several messages on a busy machine, and is one output all the same.
    settings: dict[str, Any] = {"coalesce_streams": True, "record_timing": False}
    client = NotebookClient(made, timeout=600, resources={"metadata": {"path": str(here)}}, **settings)
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})  # sums in the same order on every machine
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return made


if __name__ == "__main__":
    for each in TUTORIALS:
        if not sys.argv[1:] or each.stem in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(executed(each, Path(folder)), each)
