"""Whether an expression equals a number, by math-verify. For worker processes: it may hang.

Imported by workers alone, so that the import (a second) does not count against a job's deadline.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import math_verify
import sympy

# It warns that its own alarms are off; the pool's deadline stands in for them.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(answer: Mapping[str, Any], expression: str) -> float:
    """1 if `expression`, in LaTeX or as typed (1/2), equals answer["number"], else 0."""
    if re.search(r"\d\s+\d", expression):  # 3 1/2 is read as a product of two numbers
        return 0.0
    latex = math_verify.LatexExtractionConfig()
    no_alarm: Any = None  # the library's word for "no timeout", which its types leave out
    found = math_verify.parse(f"${expression}$", [latex], parsing_timeout=no_alarm)
    truth = sympy.Rational(answer["number"])
    return float(math_verify.verify(truth, found, float_rounding=12, timeout_seconds=None))
