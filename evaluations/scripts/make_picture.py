"""Draw `apply.svg` and `apply-smollm2.svg`: what a person sees of `ffedit apply edits/eiffel-tower.json`.

python evaluations/scripts/make_picture.py [--model smollm2]
"""

import io
import os
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parents[1]
WIDTH = 92


@click.command()
@click.option("--model", help="Another than Atlas.")
def main(model: str | None) -> None:
    """Run the command in colour and keep its terminal as SVG."""
    command = ["apply", "edits/eiffel-tower.json", *(["--model", model] if model else [])]
    shown = subprocess.run(
        [sys.executable, "-m", "ffedit", *command],
        cwd=HERE.parent,
        env={**os.environ, "FORCE_COLOR": "1", "COLORTERM": "truecolor", "COLUMNS": str(WIDTH)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    ).stdout
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(f"$ ffedit {' '.join(command)}\n")
    console.print(Text.from_ansi(shown.rstrip()))
    svg = console.export_svg(title="ffedit")
    # Spaces at the start of a line are part of the picture.
    name = f"apply-{model}.svg" if model else "apply.svg"
    (HERE / "reports" / name).write_text(svg.replace("<text ", '<text xml:space="preserve" '), encoding="utf-8")


if __name__ == "__main__":
    main()
