"""The results of a corpus as JUnit XML, which Jenkins and GitLab read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .results import Row

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot contain, not even as references."""


def junit_xml(rows: Sequence[Row]) -> bytes:
    """Format rows as a document with one suite, in which each capture is a test case.

    A verdict that does not hold is a failure, a capture without a verdict an error, and one of a frame
    that another capture has is skipped.

    Args:
        rows: what came of each capture.
    """
    skipped = [row for row in rows if row.same_as is not None]
    wrong = [row for row in rows if row.same_as is None and not row.holds]
    counts = {
        "name": " ".join(["torch-fakeify", *sorted({row.backend for row in rows})]),
        "tests": len(rows),
        "failures": sum(not row.is_error for row in wrong),
        "errors": sum(row.is_error for row in wrong),
        "skipped": len(skipped),
        "time": f"{sum(row.seconds for row in rows):.3f}",
    }
    root = ET.Element("testsuites")
    suite = _element(root, "testsuite", **counts)
    for row in rows:
        _add(suite, row)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _add(suite: ET.Element, row: Row) -> None:
    *folders, name = row.file.split("/")
    case = _element(
        suite,
        "testcase",
        classname=".".join([row.backend, *filter(None, folders)]),
        name=name,
        time=f"{row.seconds:.3f}",
    )
    text = "\n".join([row.verdict, *(f"  {line}" for line in row.details)])
    if row.same_as is not None:
        message = f"the same frame as {row.same_as}: {row.verdict}"
        _element(case, "skipped", type="torch_fakeify.duplicate", message=message)
    elif not row.holds:
        kind = "error" if row.is_error else "failure"
        message = f"{row.verdict}: {row.summary}" if row.summary else row.verdict
        _element(case, kind, type=row.verdict, message=message).text = _clean(text)
    else:
        _element(case, "system-out").text = _clean(text)


def _element(parent: ET.Element, tag: str, **attributes: object) -> ET.Element:
    return ET.SubElement(parent, tag, {k: _clean(str(v)) for k, v in attributes.items()})


def _clean(text: str) -> str:
    """Escape the characters that XML cannot contain."""
    return _NOT_IN_XML.sub(lambda found: ascii(found.group())[1:-1], text)
