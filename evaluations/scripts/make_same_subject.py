"""Of the reporting edits, those of subjects with two or three of them, as facts for `ffedit bench`.

python evaluations/scripts/make_same_subject.py --out pairs.json
"""

import json
from collections import Counter
from pathlib import Path

import click
from common import DATA


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Records in CounterFact's format.")
def main(out: Path) -> None:
    """Keep the records whose subject stands in another one, too."""
    records = [record for record in json.loads(DATA.read_text(encoding="utf-8")) if record["split"] == "reporting"]
    times = Counter(record["requested_rewrite"]["subject"] for record in records)
    kept = [record for record in records if times[record["requested_rewrite"]["subject"]] > 1]
    out.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
