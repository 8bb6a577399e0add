"""Put on the site what stands outside `docs/`, show the tutorials as pages, and write formulas as MathML.

Pages link to reports and pictures as they stand in the repository (`../evaluations/reports/size.md`), so that a link
works where the repository is read and on the site alike. Browsers show MathML themselves: no script, no network.
A tutorial is a notebook with its outputs; its page shows each cell as text, code, and what the code gave.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)#\s:]+)")
FORMULA = re.compile(r'class="arithmatex">\\(?:\((.*?)\\\)|\[(.*?)\\\])<', re.DOTALL)
NOTEBOOK = re.compile(r"\]\(([^)#\s:]+)\.ipynb\)")
# Of a notebook's page: outputs are 100 columns wide, and fit beside the navigation without a table of contents.
OUTPUT = '<div style="font-size:.62rem">{}</div>'
HEAD = "---\nhide:\n  - toc\n---\n\n"
CHANGELOG = "<!-- CHANGELOG.md -->"


def linked(page: Path, text: str) -> Iterator[Path]:
    """Yield the files of the repository outside `docs/` that the `text` of a page links to."""
    for target in LINK.findall(text):
        file = (page.parent / target).resolve()
        if file.is_file() and file.is_relative_to(ROOT) and not file.is_relative_to(DOCS):
            yield file


def changelog() -> str:
    """Return the changelog, its links as they are from a page in `docs/`."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!docs/|https?:)", "](../", text).replace("](docs/", "](")


def cells(notebook: Path) -> Iterator[tuple[str, bytes | None]]:
    """Yield the Markdown of each cell and output of a notebook; of a picture, its bytes too."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        yield (f"```python\n{source}\n```" if cell["cell_type"] == "code" else source), None
        for output in cell.get("outputs", ()):
            yield from shown(output)


def shown(output: Mapping[str, Any]) -> Iterator[tuple[str, bytes | None]]:
    """Yield the richest form of an output; warnings and progress are left out."""
    data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
    if "image/png" in data:
        yield "", base64.b64decode(data["image/png"])
    elif "text/html" in data:
        yield OUTPUT.format(data["text/html"]), None
    elif output.get("name") != "stderr":
        yield f"```text\n{data.get('text/plain') or ''.join(output['text'])}\n```".replace("\n\n```", "\n```"), None


def tutorials(config: MkDocsConfig) -> Iterator[tuple[Path, str, list[File]]]:
    """Yield each notebook, its text as Markdown, and the files of the site that show it."""
    for notebook in sorted(DOCS.glob("tutorials/*.ipynb")):
        made, parts = [], []
        for i, (text, picture) in enumerate(cells(notebook)):
            if picture is not None:
                name = f"{notebook.stem}-{i}.png"
                made.append(File.generated(config, f"tutorials/{name}", content=picture))
                text = f"![what the code draws]({name})"
            parts.append(text)
        page = HEAD + "\n\n".join(parts)
        yield notebook, page, [*made, File.generated(config, f"tutorials/{notebook.stem}.md", content=page)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the tutorials, every file outside `docs/` that a page links to, and those that these link to."""
    waiting = [(page, page.read_text(encoding="utf-8")) for page in sorted(DOCS.glob("*.md"))]
    waiting.append((DOCS / "changelog.md", changelog()))
    for notebook, text, made in tutorials(config):
        waiting.append((notebook, text))
        for file in made:
            files.append(file)
    added: set[Path] = set()
    while waiting:
        for file in linked(*waiting.pop()):
            if file in added:
                continue
            added.add(file)
            inside = file.relative_to(ROOT)
            page = file.suffix == ".md"
            to = inside.with_suffix("") / "index.html" if page else inside
            files.append(
                File(
                    f"../{inside.as_posix()}",
                    config.docs_dir,
                    config.site_dir,
                    config.use_directory_urls,
                    dest_uri=to.as_posix(),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
            )
            if page:
                waiting.append((file, file.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the changelog in its page, and link to the page of a notebook instead of the notebook."""
    markdown = markdown.replace(CHANGELOG, changelog()) if page.file.src_uri == "changelog.md" else markdown
    return NOTEBOOK.sub(r"](\1.md)", markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the LaTeX that `pymdownx.arithmatex` marks by MathML."""

    def mathml(formula: re.Match[str]) -> str:
        inline, block = formula.groups()
        display = "inline" if block is None else "block"
        return f'class="arithmatex">{convert(html.unescape(inline or block), display=display)}<'

    return FORMULA.sub(mathml, content)
