"""What `.ci/matrix` found, as Markdown: ``python3 matrix_table.py RESULTS VERSION...``.

Exit status 1 if anything failed. It needs neither torch nor this package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "harness"))

import exchange

CHECKS = ("tests", "demo", "census", "drop-in", "doctor")


def main() -> int:
    """Print the table of versions, and those of the exchange."""
    results, versions = Path(sys.argv[1]), sys.argv[2:]
    rows = [_row(results / version) for version in versions]
    shown = [name for name in CHECKS if any(row[name] for row in rows)]
    print("| torch | " + " | ".join(shown) + " |")
    print("|---" * (len(shown) + 1) + "|")
    for row in rows:
        print(f"| {row['torch']} | " + " | ".join(row[name] for name in shown) + " |")
    said = [found for version in versions for found in _said(results / version)]
    print("", *exchange.table(said), sep="\n")
    statuses = [p.read_text().strip() for v in versions for p in (results / v).glob("*.status")]
    failures = [r for r in exchange.readings(said) if r.word == "failure"]
    return int(bool(failures) or set(statuses) != {"0"})


def _row(results: Path) -> dict[str, str]:
    said = _said(results)
    return {
        "torch": said[0]["torch"] if said else results.name,
        "tests": _tests(results, "tests"),
        "demo": _status(results, "demo"),
        "census": _tests(results, "census"),
        "drop-in": _tests(results, "dropin"),
        "doctor": _status(results, "doctor"),
    }


def _said(results: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(results.glob("read-*.json"))]


def _status(results: Path, name: str) -> str:
    path = results / f"{name}.status"
    if not path.exists():
        return ""
    status = path.read_text().strip()
    return "passes" if status == "0" else f"**exit status {status}**"


def _tests(results: Path, name: str) -> str:
    """How many tests passed of those that ran, and how many did not run."""
    path = results / f"{name}.xml"
    if not path.exists():
        return _status(results, name)
    suites = [suite.attrib for suite in ElementTree.parse(path).getroot().iter("testsuite")]
    total, failed, errors, skipped = (
        sum(int(suite[key]) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    ran = total - skipped
    passed = ran - failed - errors
    text = f"{passed} of {ran} pass" if passed == ran else f"**{passed} of {ran} pass**"
    return f"{text}, {skipped} skipped" if skipped else text


if __name__ == "__main__":
    sys.exit(main())
