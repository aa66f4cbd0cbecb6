"""Numbers as ground truths and at the end of responses; expressions go to math-verify."""

from decimal import Decimal

import pytest

from common.errors import UserError
from common.tasks import number_expressions
from common.tasks.number_answers import final_number, number_job, score_number, truth_number


@pytest.mark.parametrize(
    ("truth", "number"),
    [
        ("72", "72"),
        (72, "72"),
        (-0.5, "-0.5"),
        ("so\n#### 1,234.50", "1234.50"),
        (" $18 ", "18"),
        ("+5%", "5"),
        (Decimal("3.0"), "3.0"),
    ],
)
def test_a_ground_truth_is_one_plain_number(truth, number):
    assert truth_number(truth) == number


@pytest.mark.parametrize(
    "truth",
    [
        {"target": 5, "numbers": [1, 2, 3]}, ["5", "6"], "1/2", "1e3", 1e16, "\u22125",
        r"\boxed{\frac{1}{2}}", True, float("nan"), float("inf"), "none", "", "#### ", "7 apples",
        "5 or 6", "1,23", "\u0664\u0662", None,
    ],
)  # fmt: skip
def test_any_other_ground_truth_is_refused(truth):
    """Its last digits were taken once: 3, 6, 2, 3, 16, 5 and 2 for the first seven."""
    with pytest.raises(UserError, match="ground_truth=.*: expected a number") as error:
        truth_number(truth)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 42", "42"),
        ("first 41, then 42.", "42"),
        ("#### 42\nand 43 more", "42"),
        ("#### 1 no, #### 42", "42"),
        ("####\n42", "42"),
        ("#### $1,234.50", "1234.5"),
        ("#### -$5", "-5"),
        ("#### 72 (12*6)", "72"),
        (r"\boxed{7} of 9", "7"),
        (r"\boxed{7 of 9}", "7"),
        (r"\boxed{7} or \boxed{-8}", "-8"),
        (r"\boxed{\$72}", "72"),
        (r"\(42\)", "42"),
        ("**42**", "42"),
        ("x=5", "5"),
        ("18/hour", "18"),
        ("-5", "-5"),
        ("\u22125", "-5"),
        ("1e3", "1000"),
        ("1,000,000 people", "1000000"),
        ("0.5%", "0.5"),
        ("42.0", "42"),
        ("#### none", None),
        (r"\boxed{x} 3", None),
        ("no number", None),
        ("", None),
    ],
)
def test_plain_final_number(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))
    assert number_job({"number": "1"}, text) is None


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ("so 1/2.", "0.5", "2"),  # was 2, its last digits
        (r"\boxed{\frac{1}{2}}", "0.5", "1"),
        (r"\boxed{3\times 10^2}", "300", "3"),
        ("#### 5 - 3", "2", "5"),
        ("2^3", "8", "3"),
        ("2+2=4", "4", "2"),
        ("10-20", "-10", "-20"),
        (r"\boxed{72\text{ apples}}", "72", "7"),
        (r"\boxed{\frac{719999999}{10000000}}", "71.9999999", "72"),
    ],
)
def test_an_expression_has_its_value_and_not_that_of_its_last_digits(text, right, wrong):
    for number, score in ((right, 1.0), (wrong, 0.0)):
        job = number_job({"number": number}, text)
        assert number_expressions.score(job.answer, job.response) == score
        assert score_number({"number": number}, text) == 0.0  # only a worker evaluates
    assert job.scorer == "common.tasks.number_expressions:score"


@pytest.mark.parametrize("text", [r"\boxed{3 1/2}", "1/0", r"#### 2\pi", "1.5.2", "12:30", "1,2"])
def test_what_is_no_number_scores_nothing(text):
    for number in ("2", "3", "3.5", "0", "1", "12", "30"):
        job = number_job({"number": number}, text)
        assert job is None or number_expressions.score(job.answer, job.response) == 0.0


def test_hostile_text_is_read_at_once():
    assert score_number({"number": "42"}, "1," * 200_000 + " 42") == 1.0
    assert score_number({"number": "42"}, "9" * 200_000) == 0.0
    assert score_number({"number": "42"}, "\u0664\u0662") == 0.0  # digits of other scripts
    assert final_number("#### " + "1+" * 3000) is None  # over 200 characters: no answer
    assert final_number("#### " + "(" * 3000 + "1") is not None
