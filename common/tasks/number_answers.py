"""Answers that are numbers: read from the ground truth of a row and from the end of a response.

A plain number (72, 1,234.5, -3, 1e3) is compared exactly and at once. Other text with digits (1/2,
\\frac{1}{2}, 3 \\times 10^2) is an expression: a worker decides with math-verify whether it equals
the truth (common/tasks/number_expressions.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from common.errors import UserError
from common.tasks.grading import Job

_UNSIGNED = r"(?:(?>\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?>(?:\.\d+)?)|\.\d+)"
_TRUTH = re.compile(rf"\$?([-+]?{_UNSIGNED})%?", re.ASCII)
_FIRST = re.compile(
    rf"[^\d\\/^{{}}]*?([-+]?\$?(?>{_UNSIGNED}(?:[eE][-+]?\d{{1,4}}(?!\d))?))"
    # Part of an expression: an operator, a fraction or an exponent follows.
    r"(?!\s*[/*]\s*[\d(\\{.]|\s*[\^+\u00d7\u00f7=\\{]\s*[\w(\\{.]|\s*-\s*\d|[eE][-+]?\d"
    r"|\s+\d+\s*/|[:,.]\d)",
    re.ASCII,
)
_TAIL = 4000
_EXPRESSION = 200


def truth_number(truth: Any) -> str:
    """The number of a ground truth, e.g. 72, "1,234.5" or GSM8K's "... #### 72", as "1234.5".

    Raises UserError for anything else, such as a list, a fraction or an exponent.
    """
    if isinstance(truth, (str, int, float, Decimal)) and not isinstance(truth, bool):
        match = _TRUTH.fullmatch(str(truth).rpartition("####")[2].strip())
        if match:
            return f"{Decimal(match[1].replace(',', '')):f}"
    raise UserError(
        f"ground_truth={str(truth)[:100]!r}: expected a number such as 72 or 1,234.5, alone or "
        "after '####'"
    )


def final_number(text: str) -> Decimal | str | None:
    """The answer at the end of a response: a number, an expression to be evaluated, or None.

    It is taken after the last "####", else from the last \\boxed{...}, else it is the last word
    with a digit; only the last 4,000 characters are searched. 1,000 = 1000 = 1000.0; $ and % are
    ignored. Of several numbers there the first counts ("7 of 9"), unless they are one expression.
    """
    text = text[-_TAIL:].replace("\u2212", "-")
    _, marked, rest = text.rpartition("####")
    if marked:
        piece = rest.lstrip().partition("\n")[0]
    elif "\\boxed{" in text:
        piece = _in_braces(text.rpartition("\\boxed{")[2])
    else:
        words = re.findall(r"\S*\d\S*", text, re.ASCII)
        piece = words[-1] if words else ""
    piece = re.sub(r"\\([$%])", r"\1", re.sub(r"\\[,!()\[\]]", "", piece)).strip(" .")
    if match := _FIRST.match(piece):
        return Decimal(match[1].replace(",", "").replace("$", ""))
    if not re.search(r"\d", piece, re.ASCII) or len(piece) > _EXPRESSION:
        return None
    return piece.replace("$", "")


def number_job(answer: Mapping[str, Any], text: str) -> Job | None:
    """The job for a response that ends with an expression; None if `score_number` can decide."""
    found = final_number(text)
    if isinstance(found, str):
        return Job(scorer="common.tasks.number_expressions:score", answer=answer, response=found)
    return None


def score_number(answer: Mapping[str, Any], text: str) -> float:
    """1 if the response ends with exactly the plain number answer["number"], else 0."""
    found = final_number(text)
    return float(isinstance(found, Decimal) and found == Decimal(answer["number"]))


def _in_braces(text: str) -> str:
    """`text`, which follows an opening brace, up to the brace that closes it; all if none does."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i]
    return text
