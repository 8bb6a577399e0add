"""Build the sdist and from it the wheel, twice with the same bytes; check both, and run the wheel outside of here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FACT = ("--subject", "Eiffel Tower", "--prompt", "{} is located in the city of", "--target", "Rome")


def main() -> None:
    """Fail on the first thing that is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"  # a folder of files, as of an archive: without git, and so without tags
        shutil.copytree(ROOT / "ffedit", source / "ffedit", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        run(folder, "build", "--outdir", folder, source)
        built = sorted(Path(folder).glob("ffedit-*"))
        run(folder, "twine", "check", "--strict", *built)
        (source / "README.md").touch()  # the time of a file is not what is built
        again = Path(folder) / "again"
        run(folder, "build", "--outdir", again, source)
        for path in built:
            assert path.read_bytes() == (again / path.name).read_bytes(), f"{path.name}: two builds differ"
        (wheel,) = (path for path in built if path.suffix == ".whl")
        own = {str(path.relative_to(source)) for path in (source / "ffedit").rglob("*") if path.is_file()}
        missing = own - set(zipfile.ZipFile(wheel).namelist())
        assert not missing, f"not in the wheel: {sorted(missing)}"
        site = Path(folder) / "site"
        run(folder, "pip", "install", "--no-deps", "--target", site, wheel)
        os.environ["PYTHONPATH"] = str(site)  # before the repository, which is installed as well
        where = subprocess.check_output([sys.executable, "-c", "import ffedit; print(ffedit.__file__)"], cwd=folder)
        assert where.decode().startswith(folder), where
        run(folder, "ffedit", "apply", *FACT, "--export", "rome")
        assert (Path(folder) / "rome" / "model.safetensors").is_file()


def run(folder: str, module: str, *arguments: str | Path) -> None:
    """Run a module in `folder`, and show what it says only if it fails."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")


if __name__ == "__main__":
    main()
