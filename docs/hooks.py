"""Put on the site what stands outside `docs/`, and write formulas as MathML.

Pages link to reports and pictures as they stand in the repository (`../evaluations/reports/size.md`), so that a link
works where the repository is read and on the site alike. Browsers show MathML themselves: no script, no network.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)#\s:]+)")
FORMULA = re.compile(r'class="arithmatex">\\(?:\((.*?)\\\)|\[(.*?)\\\])<', re.DOTALL)
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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside `docs/` that a page links to, and those that these link to."""
    waiting = [(page, page.read_text(encoding="utf-8")) for page in sorted(DOCS.glob("*.md"))]
    waiting.append((DOCS / "changelog.md", changelog()))
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
    """Put the changelog in its page."""
    return markdown.replace(CHANGELOG, changelog()) if page.file.src_uri == "changelog.md" else markdown


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the LaTeX that `pymdownx.arithmatex` marks by MathML."""

    def mathml(formula: re.Match[str]) -> str:
        inline, block = formula.groups()
        display = "inline" if block is None else "block"
        return f'class="arithmatex">{convert(html.unescape(inline or block), display=display)}<'

    return FORMULA.sub(mathml, content)
