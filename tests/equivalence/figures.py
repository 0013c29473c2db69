"""Prints the measured figures as the Markdown table of docs/exactly.md.

KERAS_MIRROR_REPLICAS=2,3,4 KERAS_MIRROR_FIGURES=figures.jsonl python -m pytest tests/equivalence
python tests/equivalence/figures.py figures.jsonl
"""

import json
import pathlib
import sys

import cases_losses
import cases_metrics
import cases_models
import cases_optimizers
import cases_steps

TABLES = {
    "losses, weights, masks, regularisers": cases_losses,
    "metrics": cases_metrics,
    "optimizers and their options": cases_optimizers,
    "models, layers, inputs": cases_models,
    "custom steps, ways to feed and to call": cases_steps,
}


def main(path: str) -> None:
    runs = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    print("| rows about | rows | runs | replicas | largest difference of weights | of optimizer state | of loss and metrics |")
    print("|---|---|---|---|---|---|---|")
    for title, module in TABLES.items():
        names = {case.name for case in module.CASES if case.dtype == "float64"}
        mine = [run for run in runs if run["row"] in names]
        if mine:
            worst = {part: max(run[part] for run in mine) for part in ("weights", "state", "logs")}
            replicas = ", ".join(map(str, sorted({run["replicas"] for run in mine})))
            found = len({run["row"] for run in mine})
            figures = " | ".join(f"{worst[part]:.0e}" for part in ("weights", "state", "logs"))
            print(f"| {title} | {found} | {len(mine)} | {replicas} | {figures} |")


if __name__ == "__main__":
    main(sys.argv[1])
