"""Whether an expression equals a number, by math-verify; in worker processes, as it may hang.

Only workers import it, before the deadline of a job begins: the import takes a second.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import math_verify
import sympy

# It warns that its own timeouts are off; the deadline of the pool replaces them.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(answer: Mapping[str, Any], expression: str) -> float:
    """1 if `expression`, in LaTeX or as typed (1/2), equals answer["number"], else 0."""
    if re.search(r"\d\s+\d", expression):  # math-verify would read 3 1/2 as a product
        return 0.0
    latex = math_verify.LatexExtractionConfig()
    no_alarm: Any = None  # means no timeout, which the types of the library do not allow
    found = math_verify.parse(f"${expression}$", [latex], parsing_timeout=no_alarm)
    truth = sympy.Rational(answer["number"])
    return float(math_verify.verify(truth, found, float_rounding=12, timeout_seconds=None))
