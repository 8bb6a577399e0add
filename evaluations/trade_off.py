"""What single edits gain and lose with one setting: a table and a curve from reports of `single_edits.py`.

    for K in 0 6 24; do
        python evaluations/single_edits.py --split tuning --limit 60 --set keep=$K --out trade-off/keep-$K
    done
    python evaluations/trade_off.py keep trade-off/keep-*.json --out evaluations/trade-off

`keep` weighs what the model says of the subject apart from the fact: the more it counts, the more of the subject's
other facts stay, and the fewer paraphrases follow.
"""

import json
from pathlib import Path

import click
import matplotlib.pyplot as plt
from common import table

from ffedit.evaluator import Scores

CURVES = ("efficacy", "paraphrase", "specificity", "same_subject")


@click.command()
@click.argument("setting")
@click.argument("reports", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Table and picture, without suffix.")
def main(setting: str, reports: tuple[Path, ...], out: Path) -> None:
    """Put the reports in the order of the setting, as a row and a point each."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in reports]
    found.sort(key=lambda report: report["config"][setting])
    values = [report["config"][setting] for report in found]
    scores = [Scores(**report["after"]) for report in found]
    rows = [((f"{value:g}", str(report["edits"])), s) for value, report, s in zip(values, found, scores, strict=True)]
    text = table(rows, [setting, "edits"])
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in CURVES:
        axes.plot([f"{value:g}" for value in values], [getattr(s, name) for s in scores], marker="o", label=name)
    axes.set(xlabel=setting, ylabel="share of prompts", ylim=(0, 1.02))
    axes.legend()
    figure.savefig(out.with_suffix(".png"), dpi=120)
    print(text)


if __name__ == "__main__":
    main()
