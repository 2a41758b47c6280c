"""The guards of what Dynamo has compiled, as it prints them."""

from __future__ import annotations

import re

from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

_CHANGING = re.compile(
    r"\b0x[0-9a-f]+\b|(?<!\d)\d{9,}(_c\d+)?|(?<=_c)\d+|(?<=__builtins_dict___)\d+| +(?=#)"
)
"""Addresses, identities, the counters in the names that Dynamo gives to globals, and the space that
these need before the user's line."""

LINE = "@#"
"""What stands between a guard and the user's line."""


def printed_guards() -> list[str]:
    """The guards of each compiled frame that Dynamo holds, without what is different each time."""
    codes = [ref() for ref in convert_frame.input_codes.seen]
    entries = [e for code in codes if code is not None for e in _debug_get_cache_entry_list(code)]
    return [_CHANGING.sub("@", str(entry.guard_manager)) for entry in entries]
