"""The HTML page for filling in annotation sheets: one file, no network, saved as JSON lines by the browser."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from ffedit.facts.text import visible

# The paper's annotators found 3.6 patterns per key on average, so three would be too few.
PATTERNS = 5
STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf8; --sheet: #fff; --soft: #5d6673; --line: #e3e0da; --mark: #ffe9a8 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --sheet: #1c2026; --soft: #9aa4b1; --line: #323841; --mark: #5c4a12 }
}
* { box-sizing: border-box }
html { font: 16px/1.45 system-ui, sans-serif; background: var(--paper) }
body { max-width: 64rem; margin: 0 auto; padding: 1rem 1rem 6rem; overflow-wrap: anywhere }
h1, h2 { line-height: 1.2; margin: 0 0 .5rem } .note { color: var(--soft); max-width: 46rem }
section { margin: 2.5rem 0 0; padding-top: 1.2rem; border-top: 1px solid var(--line) }
section p { display: grid; grid-template-columns: auto minmax(0, 24rem) auto; justify-content: start; gap: .5rem }
section p { align-items: center; margin: .3rem 0 }
input[type=text], select { font: inherit; padding: .2rem .4rem; min-width: 0 }
ol { list-style: none; padding: 0; background: var(--sheet); border: 1px solid var(--line); border-radius: .5rem }
li { display: grid; grid-template-columns: 2rem 1fr auto; gap: .2rem .8rem; padding: .4rem .8rem }
li { align-items: baseline }
li + li { border-top: 1px solid var(--line) } .number { color: var(--soft); text-align: right }
mark { background: var(--mark); color: inherit; border-radius: .2rem; padding: 0 .15em; font-weight: 600 }
.boxes { white-space: nowrap } .boxes label { color: var(--soft); padding: .2rem .25rem; font-size: .85rem }
@media (max-width: 40rem) { li { grid-template-columns: 1.5rem 1fr } .boxes { grid-column: 2 } }
button { position: fixed; right: 1rem; bottom: 1rem; font-size: 1rem; padding: .6rem 1.4rem }
"""
SCRIPT = """
const sheets = JSON.parse(document.getElementById('sheets').textContent)
function filled(sheet, i) {
  const patterns = []
  for (let p = 0; p < PATTERNS; p++) {
    const covers = [...document.querySelectorAll(`[name="${i}-${p}"]:checked`)].map(box => Number(box.value))
    if (!covers.length) continue
    const kind = document.querySelector(`[name="kind-${i}-${p}"]`).value
    patterns.push({ name: document.querySelector(`[name="name-${i}-${p}"]`).value, kind, covers })
  }
  return { ...sheet, patterns }
}
// What is filled in outlives a reload, where the browser lets a page keep something.
const fields = [...document.querySelectorAll('input, select')]
const place = JSON.stringify([document.title, ...sheets.map(sheet => [sheet.memory, sheet.triggers[0]])])
try {
  const kept = JSON.parse(localStorage.getItem(place) || '[]')
  kept.forEach((value, i) => typeof value === 'boolean' ? fields[i].checked = value : fields[i].value = value)
  document.addEventListener('input', () => {
    const values = fields.map(field => field.type === 'checkbox' ? field.checked : field.value)
    localStorage.setItem(place, JSON.stringify(values))
  })
} catch (error) { }
document.querySelector('button').onclick = () => {
  const lines = sheets.map((sheet, i) => JSON.stringify(filled(sheet, i)) + '\\n').join('')
  const link = document.createElement('a')
  link.href = URL.createObjectURL(new Blob([lines], { type: 'application/jsonl' }))
  link.download = 'annotations.jsonl'
  link.click()
}
"""


def page(sheets: Sequence[dict[str, Any]], title: str, last: bool = True) -> str:
    """Return a page with fields for each key's patterns, their kind, and the triggers that each covers.

    Args:
        sheets: one for each key.
        title: the model and the corpus of the sheets.
        last: whether a trigger's position is its last token; if not, the text marks the position «so».
    """
    parts = [_sheet(number, sheet, last) for number, sheet in enumerate(sheets)]
    data = json.dumps(list(sheets), ensure_ascii=False).replace("<", "\\u003c")
    shown = _shown(title)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Patterns: {shown}</title><style>{STYLE}</style>"
        f'<h1>Patterns in triggers</h1><p class="note">{shown}</p>'
        '<p class="note">For each memory, name what at least three of its triggers have in common, tick the triggers '
        "that have it, and say whether it is shallow (a last word, a group of words) or semantic (a topic). Then save."
        f"</p>{''.join(parts)}<button>Save</button>"
        f'<script type="application/json" id="sheets">{data}</script>'
        f"<script>const PATTERNS = {PATTERNS}\n{SCRIPT}</script></html>\n"
    )


def _sheet(number: int, sheet: dict[str, Any], last: bool) -> str:
    names = "".join(
        f'<p><label for="name-{number}-{p}">{p + 1}</label>'
        f'<input type="text" id="name-{number}-{p}" name="name-{number}-{p}" placeholder="pattern">'
        f'<select name="kind-{number}-{p}" aria-label="kind of {p + 1}"><option>shallow<option>semantic</select>'
        "</p>"
        for p in range(PATTERNS)
    )
    rows = "".join(
        f'<li><span class="number">{i}</span>{_marked(text, last)}<span class="boxes">{_boxes(number, i)}</span></li>'
        for i, text in enumerate(sheet["triggers"], 1)
    )
    return f"<section><h2>{_shown(sheet['memory'])}</h2>{names}<ol>{rows}</ol></section>"


def _boxes(number: int, trigger: int) -> str:
    return " ".join(
        f'<label>{p + 1}<input type="checkbox" name="{number}-{p}" value="{trigger}"></label>' for p in range(PATTERNS)
    )


def _marked(text: str, last: bool) -> str:
    """Return a trigger as HTML with its own text direction; with `last`, its last word is highlighted."""
    before, space, word = text.rpartition(" ") if last else (text, "", "")
    return f"<bdi>{_shown(before + space)}{f'<mark>{_shown(word)}</mark>' if word else ''}</bdi>"


def _shown(text: str) -> str:
    return html.escape(visible(text))
