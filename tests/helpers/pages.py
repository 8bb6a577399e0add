"""Pages as a browser reads them: their tags, hostile text for all that they show, and Chromium, where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from html import escape, unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ffedit import MemoryIndex

EVIL = "<script>alert(1)</script>\"'&\x00\x1b\n\u202eright\ud800 שלום "
VOID = {"meta", "link", "line", "path", "circle", "rect", "input"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Read(HTMLParser):
    """What a page is made of; fails where a tag is left open."""

    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        if tag == "a":
            self.links.append(found["href"] or "")
        self.fetched += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action", "data") and tag != "a"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag


def read(text: str) -> Read:
    (found := Read()).feed(text)
    assert not found.open
    return found


def needs_nothing_else(text: str) -> Read:
    """Check that a page neither fetches nor runs anything, and has one outline."""
    found = read(text)
    assert not found.links
    assert found.fetched == ["data:,"] and not re.search(r"@import|url\(|https?:", text)
    assert "script" not in found.tags and found.tags.count("h1") == 1 and found.tags.count("main") == 1
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    levels = [int(tag[1]) for tag in found.tags if re.fullmatch(r"h\d", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    return found


def shows_text_only(text: str, plain: str) -> None:
    """Check that a page of hostile text has the tags of the `plain` one, and no character that cannot be seen."""
    found = read(text)
    assert "script" not in found.tags and "<script" not in text and "alert(1)" in text
    assert not [c for c in text if not c.isprintable() and c not in "\n"]
    assert found.tags == read(plain).tags
    text.encode()


def said(text: str) -> str:
    """The words of a page."""
    return " ".join(unescape(re.sub(r"<style>.*</style>|<[^>]*>", " ", text, flags=re.DOTALL)).split())


def poisoned(value: Any, ours: Collection[str]) -> Any:
    """A view or a record that has `EVIL` in all of its texts, but for those named `ours`."""
    if isinstance(value, str):
        return EVIL + value
    if isinstance(value, tuple | list):
        return type(value)(poisoned(inner, ours) for inner in value)
    if isinstance(value, dict):
        return {key: inner if key in ours else poisoned(inner, ours) for key, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, MemoryIndex | type):
        mine = {one.name: getattr(value, one.name) for one in fields(value) if one.name not in ours}
        return replace(value, **{name: poisoned(inner, ours) for name, inner in mine.items()})
    return value


# Chromium ------------------------------------------------------------------------------------------

PHONE, DESKTOP = 390, 1280
# Chromium has no window as narrow as a phone, but a frame can be. Wide is what stands out to the right, unless it
# scrolls in a box of its own or is cut; text of less than 10 pixels is small, a paragraph of less than 90 squeezed.
# Text is pale where its contrast with what is painted behind it is below 4.5 (WCAG 2.2, 1.4.3).
LOOK = """
const brush = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true })
const light = colours => {
  colours.forEach(colour => { brush.fillStyle = colour; brush.fillRect(0, 0, 1, 1) })
  const linear = part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4
  const [red, green, blue] = [...brush.getImageData(0, 0, 1, 1).data].map(part => linear(part / 255))
  return .2126 * red + .7152 * green + .0722 * blue
}
const looked = [...document.querySelectorAll('iframe')].map(frame => {
  const view = frame.contentWindow, page = view.document, root = page.documentElement
  page.querySelectorAll('details').forEach(one => one.open = true)
  const all = [...page.querySelectorAll('body *')], named = one => `${one.tagName}.${one.getAttribute('class')}`
  const size = one => parseFloat(view.getComputedStyle(one).fontSize) * (one.getScreenCTM ? one.getScreenCTM().a : 1)
  const beyond = one => one.getBoundingClientRect().right > root.clientWidth + 1
  const holds = one => [...one.childNodes].some(node => node.nodeType == 3 && node.data.trim())
  const texts = all.filter(one => one.tagName != 'title' && holds(one))
  const contrast = one => {
    const behind = []
    for (let at = one; at; at = at.parentElement) behind.unshift(view.getComputedStyle(at).backgroundColor)
    const { fill, color } = view.getComputedStyle(one)
    const ends = [light(behind), light([...behind, one.ownerSVGElement ? fill : color])]
    return (Math.max(...ends) + .05) / (Math.min(...ends) + .05)
  }
  return {
    says: page.body.innerText,
    scripts: page.scripts.length,
    pale: texts.filter(one => contrast(one) < 4.5).map(one => `${named(one)} ${contrast(one)}`),
    ink: view.getComputedStyle(root).color,
    width: view.innerWidth,
    fits: root.scrollWidth <= root.clientWidth,
    wide: all.filter(one => beyond(one) && !one.closest('.box table, .heat th')).map(named),
    small: texts.filter(one => size(one) < 10).map(named),
    squeezed: [...page.querySelectorAll('p')].filter(one => one.clientWidth < 90).map(named),
    fetched: view.performance.getEntriesByType('resource').map(one => one.name),
    dark: view.matchMedia('(prefers-color-scheme: dark)').matches,
    paper: view.getComputedStyle(root).backgroundColor,
  }
})
document.documentElement.dataset.looked = JSON.stringify(looked)
"""


def look(folder: Path, pages: Sequence[str], dark: bool) -> list[dict[str, Any]]:
    """Open all pages in Chromium as on a phone and on a desktop, and return what `LOOK` finds of each.

    Fails on any console message; the last picture is left in `folder`. Skips where there is no Chromium.
    """
    if CHROMIUM is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    frames = "".join(
        f'<iframe width="{width}" height="800" style="border:0;display:block" srcdoc="{escape(page)}"></iframe>'
        for page in pages
        for width in (PHONE, DESKTOP)
    )
    opened, picture = folder / "opened.html", folder / f"{'dark' if dark else 'light'}.png"
    opened.write_text(f"<!doctype html><body style='margin:0'>{frames}<script>onload = () => {{ {LOOK} }}</script>")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--blink-settings=preferredColorScheme={int(not dark)}", f"--user-data-dir={folder / 'profile'}"]
    command += ["--dump-dom", f"--screenshot={picture}", f"--window-size={DESKTOP},{800 * 2 * len(pages)}"]
    done = subprocess.run([*command, opened.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    looked = re.search(r'data-looked="([^"]*)"', done.stdout)
    assert looked is not None, done.stdout[:500]
    found: list[dict[str, Any]] = json.loads(unescape(looked[1]))
    return found


def looks_right(folder: Path, pages: Sequence[str], says: Collection[str] = ()) -> None:
    """Check pages in two widths and both colour schemes, and that the first shows the texts `says`."""
    schemes = (False, "rgb(251, 250, 248)", "rgb(28, 33, 40)"), (True, "rgb(20, 23, 27)", "rgb(231, 233, 236)")
    for dark, paper, ink in schemes:
        looked = look(folder, pages, dark)
        assert [one["width"] for one in looked] == [PHONE, DESKTOP] * len(pages)
        for one in looked:
            assert one["fits"] and not one["wide"] and not one["small"] and not one["squeezed"], one
            assert not one["fetched"] and not one["scripts"], one
            assert not one["pale"], one["pale"]
            assert (one["dark"], one["paper"], one["ink"]) == (dark, paper, ink)
        assert all(text in one["says"] for one in looked[:2] for text in says), looked[0]["says"]
