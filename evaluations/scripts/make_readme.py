"""Write the table of `evaluations/README.md`: every file of data and every report, with the command that makes it.

    python evaluations/scripts/make_readme.py [--check]

The rows stand here and nowhere else. Words are the first line of the script's docstring where a row has none. Refused:
a file of data or a report without a row, a row whose files or script are not there, an option that its script does not
know. `--check` writes nothing, and fails where the table in the README is another one.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "evaluations" / "README.md"
BEGIN, END = "<!-- made by scripts/make_readme.py: edit the rows there -->", "<!-- end of what is made -->"

SINGLE = "--split reporting --limit 40 --way ffedit"
SMOLLM2, GEMMA, QWEN = (f"evaluations/data/{name}-counterfact.json" for name in ("smollm2", "gemma", "qwen"))
ASKED = (
    "--known ../shared/data/known_1000.json --more evaluations/data/more_facts.json "
    "--apart ../shared/data/smollm2_dev.json --apart ffedit/layer_choice/calibration.json "
    "--apart evaluations/data/development-subjects.json"
)
RELIABILITY = "evaluations/reports/reliability"
# Files (patterns below evaluations/), what they are ("" for the first line of the script), how they are made.
ROWS = (
    (
        "data/atlas-counterfact.json",
        "500 counterfactual edits for Atlas in CounterFact's record format, with `split` (100 for tuning defaults, 400 "
        "for reporting, by subject), `same_subject` and `portability`",
        "python evaluations/scripts/make_atlas_counterfact.py",
    ),
    (
        "data/atlas-llama-counterfact.json data/atlas-moe-counterfact.json",
        "the same for the two smaller models, on what they know",
        "python evaluations/scripts/make_atlas_counterfact.py --model atlas-llama",
    ),
    (
        "data/smollm2-counterfact.json",
        "500 edits of what SmolLM2-135M-Instruct knows (1,121 facts) in the same format, in 27 relations, at "
        "most 29 in one: 209 for development (67 with other facts of the subject that should stay), 291 for "
        "reporting (69)",
        f"python evaluations/scripts/make_edits.py --model smollm2 {ASKED} --screen bfloat16 --subjects 120 "
        f"--count 500 --out {SMOLLM2}",
    ),
    (
        "data/gemma-counterfact.json",
        "400 of what Gemma 3 270M knows (912 facts), in 38 relations, at most 19 in one: 165 for development "
        "(51), 235 for reporting (49)",
        f"python evaluations/scripts/make_edits.py --model gemma3-270m.gguf {ASKED} --screen bfloat16 --subjects 40 "
        f"--count 400 --out {GEMMA}",
    ),
    (
        "data/qwen-counterfact.json",
        "171 of what both Qwen2.5-Coder-1.5B-Instruct and Gemma know (522 facts), in 23 relations, at most 15 "
        "in one: 76 for development (27), 95 for reporting (27); known in bfloat16",
        f"python evaluations/scripts/make_edits.py --model qwen2.5-1.5b.gguf {ASKED} --dtype bfloat16 "
        f"--screen bfloat16 --screen-model gemma3-270m.gguf --subjects 25 --count 240 --out {QWEN}",
    ),
    (
        "data/smollm2-thousand.json",
        "SmolLM2's 500, and 500 facts that it does not know, of 932 subjects in all: for large batches and long "
        "sequences",
        f"python evaluations/scripts/make_edits.py --model smollm2 {ASKED} --screen bfloat16 --subjects 120 "
        "--count 500 --fill 1000 --out evaluations/data/smollm2-thousand.json",
    ),
    (
        "data/development-subjects.json",
        "subjects whose facts chose a default once: they are for development in every set",
        "",
    ),
    (
        "data/more_facts.json",
        "plainer templates for the relations of the table and of known_1000, and 1,396 more facts, by names of one "
        "vocabulary",
        "",
    ),
    (
        "data/stories-*.jsonl",
        "stable completions of a TinyStories model as edits; the first file tuned a number that the editor no longer "
        "has, the second reports",
        "python evaluations/scripts/make_stories_edits.py --model MODEL --out FILE",
    ),
    (
        "data/zoo/*-edits.json",
        "60 edits of each member of the zoo, 20 for development and 40 for reporting by another split; what "
        "follows is told apart; the models are not kept",
        "python evaluations/scripts/train_zoo.py --out DIR`, then "
        "`python evaluations/scripts/make_edits.py --model DIR/NAME --count 60 --subjects 1000 "
        "--out evaluations/data/zoo/NAME-edits.json",
    ),
    (
        "reports/atlas-report.json",
        "what an embedded model knows, and where tracing finds it recalled (`--model atlas-llama`, `atlas-moe` too)",
        "python evaluations/scripts/atlas_report.py --model atlas",
    ),
    (
        "reports/atlas-trace.*",
        "average indirect effects on 300 facts, three kinds and severed",
        "python evaluations/scripts/atlas_trace.py",
    ),
    (
        "reports/eiffel-tower-*.png",
        "exact traces of the Eiffel Tower on SmolLM2, Gemma 3 270M and Qwen2.5-Coder 1.5B",
        "ffedit locate edits/eiffel-tower.json --model FILE.gguf --kind all --plot FILE.png",
    ),
    (
        "reports/sites-gemma3-270m.png",
        "effect, reach and leak of the Eiffel Tower's sites in Gemma 3 270M",
        "ffedit locate edits/eiffel-tower.json --model gemma3-270m.gguf --leak --plot FILE.png",
    ),
    (
        "reports/site-quality.md",
        "edits at six layers and two tokens of twelve facts of SmolLM2, and what tells where an edit is good",
        "python evaluations/scripts/site_quality.py report --out OUT --into FILE",
    ),
    (
        "reports/atlas-inspect.*",
        "what Atlas's memories hold, beside the published numbers of Geva et al. 2021",
        "python evaluations/scripts/atlas_inspect.py",
    ),
    (
        "reports/atlas-single.*",
        "40 reporting facts of Atlas one by one",
        f"python evaluations/scripts/compare.py --model atlas --data evaluations/data/atlas-counterfact.json {SINGLE} "
        "--out DIR",
    ),
    (
        "reports/atlas-llama-single.* reports/atlas-moe-single.*",
        "the same for the two smaller models",
        "python evaluations/scripts/compare.py --model atlas-llama "
        f"--data evaluations/data/atlas-llama-counterfact.json {SINGLE} --out DIR",
    ),
    (
        "reports/smollm2-single.*",
        "40 reporting facts of SmolLM2 one by one, default settings",
        f"python evaluations/scripts/compare.py --model smollm2 --data {SMOLLM2} --probed {SINGLE} --out DIR",
    ),
    (
        "reports/gemma-single.*",
        "the same of Gemma 3 270M",
        f"python evaluations/scripts/compare.py --model gemma3-270m.gguf --data {GEMMA} --probed {SINGLE} --out DIR",
    ),
    (
        "reports/qwen-single.*",
        "the same of Qwen2.5-Coder-1.5B-Instruct, all 27 of such facts",
        f"python evaluations/scripts/compare.py --model qwen2.5-1.5b.gguf --dtype bfloat16 --data {QWEN} --probed "
        f"{SINGLE} --out DIR",
    ),
    (
        "reports/smollm2-rivals.*",
        "the first twelve beside the published procedure, its rate tuned, and a plain rank-one editor",
        f"python evaluations/scripts/compare.py --model smollm2 --data {SMOLLM2} --probed --split reporting "
        "--limit 12 --published-rate 0.2 --way ffedit --way published --way plain --out DIR",
    ),
    (
        "reports/smollm2-hundred.*",
        "100 reporting facts of SmolLM2 at once, three methods",
        f"ffedit bench {SMOLLM2} --where split=reporting --limit 100 --model smollm2 --layers 8 --mode batch:100 "
        "--methods memit,emmet,alphaedit --no-full --out DIR",
    ),
    (
        "reports/smollm2-sequence.*",
        "the same 100 facts one after another, alphaedit",
        f"ffedit bench {SMOLLM2} --where split=reporting --limit 100 --model smollm2 --layers 8 --mode sequential "
        "--methods alphaedit --no-full --out DIR",
    ),
    (
        "reports/smollm2-thousand.*",
        "1,000 facts of SmolLM2 at once, two methods",
        "ffedit bench evaluations/data/smollm2-thousand.json --model smollm2 --layers 8 --mode batch:1000 "
        "--methods memit,alphaedit --no-full --out DIR",
    ),
    (
        "reports/smollm2-thousand-sequence.*",
        "the same in steps of 100",
        "ffedit bench evaluations/data/smollm2-thousand.json --model smollm2 --layers 8 --mode sequential:100 "
        "--methods alphaedit,memit --no-full --out DIR",
    ),
    (
        "reports/smollm2-sequence-collateral.json",
        "two tasks and a text along the steps of alphaedit; DIR is of that run",
        "python evaluations/scripts/collateral.py DIR/edits/alphaedit/0* "
        "--out evaluations/reports/smollm2-sequence-collateral.json",
    ),
    (
        "reports/smollm2-thousand-spread.*",
        "the same at once, over three layers",
        "ffedit bench evaluations/data/smollm2-thousand.json --model smollm2 --layers 8 --spread 3 --mode batch:1000 "
        "--methods memit,alphaedit --no-full --out DIR",
    ),
    (
        "reports/smollm2-capacity.*",
        "the first 50 of them, and two tasks, as more are written beside them; DIR is of the run at once",
        "python evaluations/scripts/capacity.py DIR --out evaluations/reports/smollm2-capacity.json "
        "--plot evaluations/reports/smollm2-capacity.png",
    ),
    (
        "reports/stories-edits.*",
        "28 edits of what a TinyStories model of 260,000 parameters reliably says",
        "python evaluations/scripts/stories_edits.py --model DIR",
    ),
    (
        "reports/zoo/*",
        "40 facts of each member of the zoo, ffedit and the plain rank-one editor",
        "python evaluations/scripts/compare.py --model DIR/NAME --data evaluations/data/zoo/NAME-edits.json "
        f"{SINGLE} --way plain --out DIR",
    ),
    (
        "reports/ablation.md",
        "mechanisms on trial on real models, with paired differences",
        "python evaluations/scripts/ablation.py run --models DIR --out OUT default`, then "
        "`python evaluations/scripts/ablation.py table --out OUT --into FILE.md",
    ),
    (
        "reports/key-statistics-quality.*",
        "what C protects, before any edit: sinks, weighting, ridge, tokens",
        "python evaluations/scripts/key_statistics_quality.py --model smollm2 --tokens 8192 --tokens 16384 "
        "--out evaluations/reports/key-statistics-quality",
    ),
    (
        "reports/reliability/fuzz.json",
        "20,000 spoiled files and options: each read, or refused in one line",
        "python evaluations/reliability/fuzz.py --cases 20000 --out evaluations/reports/reliability/fuzz.json",
    ),
    (
        "reports/size.*",
        "memory and time of every step of an edit at GPT-2 XL's shape; what follows for 8B and 70B is in "
        "`docs/scale.md`",
        "python evaluations/benchmarks/size.py --out evaluations/reports/size",
    ),
    (
        "reports/apply.svg reports/apply-smollm2.svg",
        "what a person sees of `ffedit apply`",
        "python evaluations/scripts/make_picture.py`, and with `--model smollm2",
    ),
    (
        "reports/benchmarks/tracing.*",
        "`ffedit.locate` against the published loop, and its cost by layers, tokens, samples",
        "python evaluations/benchmarks/tracing.py --out FILE.json --plot FILE.png",
    ),
    (
        "reports/benchmarks/scaling.*",
        "seconds per fact of keys, values and scoring against the number of facts, beside what arithmetic allows",
        "python evaluations/benchmarks/scaling.py --counts 1,10,100,1000 --out FILE.json --plot FILE.png",
    ),
    (
        "reports/benchmarks/scaling-gpt2.*",
        "the same at GPT-2's shape",
        "python evaluations/benchmarks/scaling.py --model gpt2 --out FILE.json --plot FILE.png",
    ),
    (
        "reports/benchmarks/scoring.json",
        "scoring facts against a plain loop over prompts",
        "python evaluations/benchmarks/scoring.py --parts 2 --out FILE.json",
    ),
    (
        "reports/benchmarks/inspection.json",
        "the pass over all memories against plain forward passes, and its memory by length of the text",
        "python evaluations/benchmarks/inspection.py --tokens 8192 --rounds 2 --out FILE.json",
    ),
    (
        "reports/benchmarks/key_statistics.json",
        "statistics of five layers in one pass against one pass each, 16,384 tokens",
        "python evaluations/benchmarks/key_statistics.py --tokens 16384 --rounds 1 --out FILE.json",
    ),
    (
        "reports/benchmarks/waiting_threads.json",
        "`ffedit apply` alone and beside a busy process, with threads that spin and that wait passively",
        "python evaluations/benchmarks/waiting_threads.py --out FILE.json",
    ),
    (
        "reports/benchmarks/export.json",
        "memory and time of exporting an edit of a 1.5B-shaped checkpoint",
        "python evaluations/benchmarks/export.py",
    ),
    (
        "../ffedit/inference/neutral.txt.gz",
        "the neutral text that ships for key statistics",
        "python evaluations/scripts/make_neutral_text.py --model SMOLLM2 --out ffedit/inference/neutral.txt.gz",
    ),
    (
        "reports/reliability/kill.json",
        "",
        f"python evaluations/reliability/kill.py --cases 300 --stride 10 --minutes 19 --out {RELIABILITY}/kill.json",
    ),
    (
        "reports/reliability/kill-calls.json",
        "the same at every file-system call of the writing part of nine commands",
        "python evaluations/reliability/kill.py --cases 0 --minutes 9 --course 'cache clear' --course conversion ... "
        f"--out {RELIABILITY}/kill-calls.json",
    ),
    (
        "reports/reliability/kill-exports.json",
        "",
        "python evaluations/reliability/kill.py --cases 0 --course 'export checkpoint' --course 'export adapter' "
        f"--course 'export gguf' --out {RELIABILITY}/kill-exports.json",
    ),
    (
        "reports/reliability/kill-bench.json",
        "",
        "python evaluations/reliability/kill.py --cases 0 --minutes 5 --course bench "
        f"--out {RELIABILITY}/kill-bench.json",
    ),
    (
        "reports/reliability/kill-apply.json",
        "the same at every such call of `apply` with an edit and an export",
        "python evaluations/reliability/kill.py --cases 0 --minutes 5 --course apply "
        f"--out {RELIABILITY}/kill-apply.json",
    ),
    (
        "reports/reliability/together.json",
        "",
        f"python evaluations/reliability/together.py --cases 39 --seed 1 --out {RELIABILITY}/together.json",
    ),
    (
        "reports/reliability/faults.json",
        "",
        f"python evaluations/reliability/faults.py --cases 8 --out {RELIABILITY}/faults.json",
    ),
    (
        "reports/reliability/flips.json",
        "",
        f"python evaluations/reliability/flips.py --cases 1000 --cuts 100 --out {RELIABILITY}/flips.json",
    ),
    (
        "reports/reliability/undo.json",
        "",
        f"python evaluations/reliability/undo.py --cases 1 --steps 25 --out {RELIABILITY}/undo.json",
    ),
    ("reports/reliability/same.json", "", f"python evaluations/reliability/same.py --out {RELIABILITY}/same.json"),
    (
        "reports/reliability/long.json",
        "",
        f"python evaluations/reliability/long.py --cases 3000 --out {RELIABILITY}/long.json",
    ),
    (
        "reports/smollm2-lifelong.*",
        "RECT, REVIVE and PRUNE beside plain alphaedit and memit, 1,000 facts in steps of 100; DIR is the run above, "
        "RECT and REVIVE are folders of the same command by these methods, with `evaluations/lifelong` installed",
        "python evaluations/scripts/lifelong.py DIR REVIVE RECT --prune DIR/edits/alphaedit "
        "--out evaluations/reports/smollm2-lifelong",
    ),
    ("reliability/table.py", "", "python evaluations/reliability/table.py"),
    ("benchmarks/seconds.py", "", "python evaluations/benchmarks/seconds.py"),
    ("benchmarks/gpu.py", "", "python evaluations/benchmarks/gpu.py"),
    ("scripts/collateral.py", "", "python evaluations/scripts/collateral.py DIR/edits/alphaedit/*"),
    (
        "scripts/lifelong.py",
        "",
        "python evaluations/scripts/lifelong.py DIR evaluations/reports/smollm2-thousand-sequence.json "
        "--prune DIR/edits/alphaedit --out FILE",
    ),
    (
        "scripts/site_quality.py",
        "",
        "python evaluations/scripts/site_quality.py run --models DIR --out OUT`, then "
        "`python evaluations/scripts/site_quality.py report --out OUT",
    ),
    (
        "scripts/compare.py scripts/rivals.py",
        "",
        f"python evaluations/scripts/compare.py --model smollm2 --data {SMOLLM2} --out DIR",
    ),
    (
        "scripts/published_code.py",
        "the published ROME code itself, from a checkout of kmeng01/rome, on the same weights: see below",
        f"python evaluations/scripts/compare.py --model smollm2 --data {SMOLLM2} --split development --probed "
        "--limit 12 --way ffedit --way published-code --published-code CHECKOUT --out DIR",
    ),
)


def table() -> str:
    """Return the table in Markdown.

    Raises:
        ValueError: a file without a row, or a row that is not true.
    """
    lines, listed = ["| file | what | made by |", "|---|---|---|"], set[Path]()
    for patterns, words, command in ROWS:
        for pattern in patterns.split():
            paths = set(README.parent.glob(pattern)) if ".." not in pattern else {README.parent / pattern}
            if not paths or not all(path.exists() for path in paths):
                raise ValueError(f"{pattern}: no such file, but a row")
            listed |= paths
        for script in re.findall(r"python (\S+\.py)", command):
            source = (ROOT / script).read_text(encoding="utf-8")
            words = words or (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].rstrip(".")
        check_options(command)
        named = ", ".join(f"`{pattern}`" for pattern in patterns.split())
        lines.append(f"| {named} | {words} | {f'`{command}`' if command else 'by hand'} |")
    kept = {path for folder in ("data", "reports") for path in (README.parent / folder).rglob("*") if path.is_file()}
    if missing := sorted(kept - listed):
        raise ValueError(f"{missing[0].relative_to(ROOT)} has no row in {Path(__file__).name}")
    return "\n".join(lines)


def check_options(command: str) -> None:
    """Refuse an option that its script, or the modules that scripts share, does not declare.

    Raises:
        ValueError: there is such an option.
    """
    for script, rest in re.findall(r"python (\S+\.py)([^`]*)", command):
        shared = [ROOT / "evaluations" / "benchmarks" / "measuring.py", ROOT / "evaluations" / "scripts" / "common.py"]
        declared = "".join(path.read_text(encoding="utf-8") for path in (ROOT / script, *shared))
        for option in re.findall(r"--[\w-]+", rest):
            if f'"{option}"' not in declared:
                raise ValueError(f"{script} knows no {option}")


def main() -> None:
    """Write the table into the README, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    text = README.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    made = f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
    if not parser.parse_args().check:
        README.write_text(made, encoding="utf-8")
    elif made != text:
        sys.exit("evaluations/README.md is not up to date; python evaluations/scripts/make_readme.py writes it")


if __name__ == "__main__":
    main()
