"""Summarises reports of mutants.py as a page that a person can read and review.

python -m tests.contract.summary REPORT.json ... > benchmarks/results/mutants.md
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def summary(reports: list[dict[str, Any]]) -> str:
    """Markdown: per module its edits, killed, equivalent and surviving, then what survived."""
    lines = ["# Mutants", ""]
    for report in reports:
        lines += [f"    {report['command']}", ""]
        survivors, untried = report["survivors"], report["not_tried"]
        counts = {
            "killed": Counter(map(_module, report["killed"])),
            "survived": Counter(map(_module, survivors)),
            "not tried": Counter(map(_module, untried)),
            "equivalent": Counter(map(_module, report["equivalent"])),
        }
        lines += [f"| module | edits | {' | '.join(counts)} |", "|---|---|---|---|---|---|"]
        modules = sorted(set().union(*counts.values()))
        rows = {module: [each[module] for each in counts.values()] for module in modules}
        rows["all"] = [each.total() for each in counts.values()]
        for module, row in rows.items():
            lines.append(f"| {module} | {sum(row)} | {' | '.join(map(str, row))} |")
        score = ", ".join(f"{kind} {found}" for kind, found in report["score"].items())
        lines += ["", f"Killed by kind of edit: {score}."]
        lines += ["", "Equivalent, which no test can notice:", ""]
        for reason, count in Counter(report["equivalent"].values()).most_common():
            lines.append(f"- {count}: {reason}")
        if survivors:
            lines += ["", "Survived:", "", *(f"- `{each}`" for each in survivors)]
        lines.append("")
    return "\n".join(lines)


def _module(mutant: str) -> str:
    return mutant.split(":")[0]


if __name__ == "__main__":
    print(summary([json.loads(Path(name).read_text()) for name in sys.argv[1:]]), end="")
