# SPDX-License-Identifier: Apache-2.0
"""Fill the marked blocks of README.md and docs/*.md from result files, so that no figure is typed.

A block is `<!-- begin: FILE -->` ... `<!-- end -->`. A .txt file is shown as it is; of a .json file the "table" list of
objects is shown with its keys as columns. `--check` changes nothing and fails where a block is out of date, or a
picture: its text holds the date of the result file that it was drawn from.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES = {"docs/kernels/forward.svg": ("benchmarks/results/forward.json", "scripts/draw_roofline.py")}
BLOCK = re.compile(r"(<!-- begin: (?P<file>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(result: dict[str, object]) -> str:
    """Render a result's table and where it was measured."""
    rows = result["table"]
    assert isinstance(rows, list)
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in rows]
    where = f"Measured {result['date']} by `{result['command']}`."
    for part in ("machine", "versions"):
        named = dict(result.get(part, {}))
        if not named:
            continue
        where += f" {part.capitalize()}: " + ", ".join(f"{key} {value}" for key, value in named.items()) + "."
    if "note" in result:
        where += f" {result['note']}"
    return "\n".join([*lines, "", where])


def block(match: re.Match[str]) -> str:
    """Render one block anew."""
    path = ROOT / match["file"]
    if path.suffix == ".json":
        body = table(json.loads(path.read_text()))
    else:
        body = f"```text\n{path.read_text().rstrip()}\n```"
    return f"{match[1]}{body}\n{match[3]}"


def shows(picture: str, file: str) -> bool:
    """Whether a picture is of the result file as it is now."""
    return str(json.loads((ROOT / file).read_text())["date"]) in (ROOT / picture).read_text()


def main() -> int:
    """Update every page, or say which ones are out of date."""
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        fresh = BLOCK.sub(block, text)
        if fresh == text:
            continue
        stale.append(str(page.relative_to(ROOT)))
        if "--check" not in sys.argv:
            page.write_text(fresh)
    if "--check" in sys.argv and stale:
        print("out of date, run scripts/update_docs.py:", *stale)
    old = {picture: script for picture, (file, script) in PICTURES.items() if not shows(picture, file)}
    for picture, script in old.items():
        print(f"{picture} is out of date, run {script}")
    return 1 if old or ("--check" in sys.argv and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
