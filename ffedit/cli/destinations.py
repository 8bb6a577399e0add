"""Files and folders that `ffedit apply` writes, checked before the long computation; `work.applying` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from shlex import join

from rich.text import Text

from ffedit.display.figures.saving import check_plot
from ffedit.display.terminal.console import next_commands
from ffedit.errors import EditError
from ffedit.facts.fact import Fact
from ffedit.files.atomic import behind_links, check_free
from ffedit.files.placing import sweep


@dataclass(frozen=True)
class Destinations:
    """Options of `apply` that name the results to write; None for a result that was not asked for."""

    out: Path | None
    save_recipe: Path | None
    export_to: Path | None
    plot: Path | None
    html: Path | None
    json_to: str | None
    force: bool

    def check(self) -> None:
        """Raise EditError if a result cannot be written, or lies in a folder that is made anew."""
        folders = [folder for folder in (self.out, self.export_to) if folder is not None]
        for folder in folders:  # all of them, before one is refused
            sweep(folder.absolute().parent, folder.name)
        for folder in folders:
            check_free(folder, self.force, folder=folder == self.out)
        if self.plot is not None:
            check_plot(self.plot)
        targets = (self.save_recipe, self.plot, self.html, self.json_to)
        files = [Path(file) for file in targets if file is not None and str(file) != "-"]
        results = {path: behind_links(path) for path in (*folders, *files)}
        for result, folder in product(results, folders):
            if results[folder] in results[result].parents:
                raise EditError(f"{result}: lies in {folder}, which is made anew; name a path outside it")

    @property
    def is_gguf(self) -> bool:
        """True if a GGUF file is exported."""
        return self.export_to is not None and self.export_to.suffix == ".gguf"

    def words(self) -> str:
        """List the paths that would be written."""
        paths = (self.out, self.export_to, self.plot, self.html, self.save_recipe, self.json_to)
        return ", ".join(str(path) for path in paths if path not in (None, "-"))

    def saved(self, written: Sequence[Path]) -> list[str]:
        """List the folders that were `written`, with the command that undoes an export; "not saved" if none was."""
        folders = [path for path in (self.out, self.export_to) if path is not None and path in written]
        if not folders:
            return ["not saved"] if self.out or self.export_to else []
        parts = ["saved " + " and ".join(f"{path}{'' if path.suffix == '.gguf' else '/'}" for path in folders)]
        if self.export_to in written and not self.is_gguf:
            parts.append(f"undo: {join(['ffedit', 'undo', str(self.export_to), '--out', 'as-before'])}")
        return parts

    def next_step(self, fact: Fact, chat: bool) -> Text:
        """Suggest the commands to type next."""
        ask = ["ffedit", "ask", fact.text, *(["--chat"] if chat else [])]
        if self.export_to is not None:
            return next_commands(join([*ask, "--model", str(self.export_to)]))
        if self.out is not None:
            export = ["ffedit", "export", str(self.out), "--out", "DIR"]
            return next_commands(join([*ask, "--edit", str(self.out)]), join(export))
        return Text("Not saved: --out DIR keeps the edit, --export DIR the edited model.")
