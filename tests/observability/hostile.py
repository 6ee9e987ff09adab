"""Text that forges a line, moves the cursor, hides itself or cannot be encoded."""

import re

import msgspec

HOSTILE = (
    'x\nINFO     forged: line\r\n12:00:00 CRITICAL tenuto: forged\n{"level":"CRITICAL"}'
    "\x1b[2J\x1b]0;title\x07\x9b31m\x85\u2028\u2029\u202egnp.exe\u2066\u200e\x7f\x08\x00"
)
"""What a request or a process may bring in; a database refuses its NUL."""
STORABLE = HOSTILE.replace("\x00", "")
SURROGATE = HOSTILE + "\ud800"
HIDDEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ud800-\udfff]"
)
FORGED = re.compile(r"^INFO     forged|^12:00:00 CRITICAL|^\{\"level\":\"CRITICAL\"\}")
RECORD = re.compile(r"\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) +[\w.]+: ")


def check_log(text: str, style: str) -> None:
    """Each line is a record or, for people, a marked line of a stack, and shows every character."""
    for line in text.removesuffix("\n").split("\n"):
        assert not HIDDEN.search(line), line
        if style == "json":
            record = msgspec.json.decode(line, type=dict[str, object])
            assert {"ts", "level", "logger", "message"} <= record.keys(), line
        else:
            assert line.startswith("    | ") or RECORD.match(line), line
        assert not FORGED.search(line), line
