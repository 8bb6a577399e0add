"""Draw `reports/apply-NAME.svg`, the terminal after `ffedit apply edits/eiffel-tower.json --model MODEL`.

python evaluations/scripts/make_picture.py gemma3-270m.gguf smollm2
"""

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parents[1]
WIDTH = 100


@click.command()
@click.argument("models", nargs=-1, required=True)
def main(models: tuple[str, ...]) -> None:
    """Run the command on each of MODELS in colour, and keep its terminal as SVG."""
    for model in models:
        draw(model)


def draw(model: str) -> None:
    """Run the command twice, since the first run also collects the key statistics, and draw the second."""
    facts = "edits/eiffel-tower.json"
    path = str(Path(model).resolve()) if Path(model).exists() else model
    command = ["apply", str(HERE.parent / facts), "--model", path, "--export", "rome-tower", "--force"]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            shown = subprocess.run(
                [sys.executable, "-m", "ffedit", *command],
                cwd=folder,
                env={**os.environ, "FORCE_COLOR": "1", "COLORTERM": "truecolor", "COLUMNS": str(WIDTH)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                check=True,
            ).stdout
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(f"$ ffedit apply {facts} --model {Path(model).name} --export rome-tower\n")
    console.print(Text.from_ansi(shown.rstrip()))
    svg = console.export_svg(title="ffedit")
    # Spaces at the start of a line are part of the picture.
    name = f"apply-{Path(model).stem}.svg"
    (HERE / "reports" / name).write_text(svg.replace("<text ", '<text xml:space="preserve" '), encoding="utf-8")


if __name__ == "__main__":
    main()
