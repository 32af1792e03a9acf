"""Reasoning effort: the names clients send, the number they stand for, the line the model reads.

Source: engram-dspark-vision-chat.md 5.4; `ultra` and `minimal` as in serving.md 6.2.
"""

from __future__ import annotations

from cedar.errors import RequestError

DEFAULT_EFFORT = 75

# None switches thinking off
EFFORTS: dict[str, int | None] = {
    "none": None,
    "minimal": 50,
    "low": 50,
    "medium": 75,
    "high": 75,
    "xhigh": 75,
    "max": 100,
    "ultra": 100,
}


def effort_number(value: object, *, param: str = "reasoning_effort") -> int | None:
    """The number behind a name or a number 1..100; None means thinking off.

    Raises:
        RequestError: Neither a known name nor a whole number from 1 to 100; the message lists them.

    >>> effort_number("low"), effort_number(33), effort_number("none")
    (50, 33, None)
    """
    if isinstance(value, str) and value in EFFORTS:
        return EFFORTS[value]
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 100:
        return value
    raise RequestError(
        f"{param} is {value!r}, expected {', '.join(EFFORTS)} or a whole number from 1 to 100", param=param
    )


def effort_line(number: int) -> str:
    """The first text of a prompt with thinking on; the model was trained on it letter for letter."""
    return f"Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
