"""Write the table of `docs/reliability.md` from the reports: each promise, its driver, cases, failures found and left.

    python evaluations/reliability/table.py [--check]

`--check` writes nothing, and fails where the table in the page is another one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parents[2]
PAGE = HERE / "docs" / "reliability.md"
BEGIN, END = "<!-- made by evaluations/reliability/table.py -->", "<!-- end of the table -->"
# Driver, its reports, and how many faults of ffedit it found that were mended (the page lists them).
DRIVERS = (
    ("kill.py", ("kill", "kill-calls", "kill-apply", "kill-exports", "kill-bench"), 8),
    ("together.py", ("together",), 3),
    ("faults.py", ("faults",), 9),
    ("flips.py", ("flips",), 4),
    ("fuzz.py", ("fuzz",), 20),
    ("undo.py", ("undo",), 2),
    ("same.py", ("same",), 0),
    ("long.py", ("long",), 0),
)


def table() -> str:
    """One row for each driver."""
    lines = ["| promise | tested by | cases | faults found and mended | failures left |", "|---|---|---|---|---|"]
    for driver, names, mended in DRIVERS:
        paths = [HERE / "evaluations" / "reports" / "reliability" / f"{name}.json" for name in names]
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        cases = sum(sum(report["cases"].values()) for report in reports)
        left = sum(len(report["failures"]) for report in reports)
        links = ", ".join(f"[{name}](../evaluations/reports/reliability/{name}.json)" for name in names)
        lines.append(f"| {reports[0]['promise']} | `{driver}` ({links}) | {cases:,} | {mended} | {left or 'none'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(f"{BEGIN}\n")
    made = f"{before}{BEGIN}\n{table()}{END}{rest.split(END)[1]}"
    if "--check" not in sys.argv:
        PAGE.write_text(made, encoding="utf-8")
    elif made != page:
        sys.exit(f"{PAGE}: its table is not that of the reports; run `python evaluations/reliability/table.py`")


if __name__ == "__main__":
    main()
