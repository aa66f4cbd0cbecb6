"""Every module of common is found from the name of its test, and every test from its module.

tests/common/ROOM/test_NAME.py tests common/ROOM/NAME.py. The exceptions are listed with a reason.
"""

import pytest

from tests.conftest import ROOT

ELSEWHERE = {
    "cli/command_runs.py": ("cli/test_command_line.py", "commands are run as a user runs them"),
    "cli/commands.py": ("cli/test_command_line.py", "a table, which every command reads"),
    "cli/evaluate.py": ("tasks/test_evaluation.py", "the command of tasks/evaluation.py"),
    "config/fields.py": ("config/test_settings.py", "bounds are checked when settings are made"),
    "config/model_task.py": ("config/test_settings.py", "one of the groups of settings"),
    "config/objective_learner.py": ("config/test_settings.py", "one of the groups of settings"),
    "config/rollout_mismatch.py": ("config/test_settings.py", "one of the groups of settings"),
    "config/run.py": ("config/test_settings.py", "one of the groups of settings"),
    "crosscheck/compare_page.py": ("crosscheck/test_trace_file.py", "pages of whole traces"),
    "crosscheck/deviations.py": ("crosscheck/test_compare.py", "judged through whole comparisons"),
    "crosscheck/matrix.py": ("crosscheck/test_trace_file.py", "with made-up traces"),
    "crosscheck/sketch.py": ("../torch/test_crosscheck.py", "its projections are in every trace"),
    "crosscheck/trace.py": ("../torch/test_crosscheck.py", "a trace needs a backend"),
    "crosscheck/trace_decode.py": ("../torch/test_crosscheck.py", "a trace needs a backend"),
    "errors.py": ("cli/test_command_line.py", "a mistake ends in one line of the command"),
    "mismatch/batched_scorer.py": ("../torch/test_overlaps.py", "its passes are a backend's"),
    "mismatch/rollout_stats.py": ("mismatch/test_measure.py", "records what measure.py measures"),
    "mismatch/tail_share.py": ("mismatch/test_tail_interval.py", "both judge one tail"),
    "model/geometry.py": ("cost/test_decode_cost.py", "numbers of parameters of known models"),
    "model/hf.py": ("../jax/test_hf.py", "checked by the decoder that it loads"),
    "profile/sampled_profile.py": ("../jax/test_end_to_end.py", "samples need an engine"),
    "profile/text_profile.py": ("../jax/test_text_profile.py", "the replay needs a backend"),
    "protocols.py": ("test_loop.py", "holds no code"),
    "records/event_files.py": ("records/test_metrics.py", "written by the writer of the record"),
    "records/file_sums.py": ("records/test_run_dir.py", "a run refuses other files"),
    "records/json_checks.py": ("schedule/test_schedule.py", "checked in the files it reads"),
    "records/record_checks.py": ("records/test_damaged_runs.py", "damaged records of runs"),
    "report/html_page.py": ("report/test_report.py", "the frame of the report"),
    "rollout/budgets.py": ("../torch/test_budget_lookup.py", "compared with the devices' lookup"),
    "rollout/device.py": ("rollout/test_paged_engine.py", "a protocol; the fake device has it"),
    "setup.py": ("test_loop.py", "wiring, which every run uses"),
    "tasks/grading_worker.py": ("tasks/test_grading.py", "the other end of the same pipe"),
    "tasks/number_expressions.py": ("tasks/test_number_answers.py", "right and wrong answers"),
    "tasks/reasoning_scorer.py": ("tasks/test_reasoning.py", "one line, run in a worker"),
    "types.py": ("test_loop.py", "dataclasses without code of their own"),
}
"""Module -> (file of its tests below tests/common, why it has none of its own name)."""
SCENARIOS = {
    "cli/test_command_fuzz.py": "random command lines",
    "cli/test_fuzz_commands.py": "random values of flags",
    "config/test_settings.py": "all groups of settings together",
    "mismatch/test_controller_loop.py": "the controller in a training loop",
    "mismatch/test_kept_state.py": "damaged state of a controller, of a profile",
    "records/test_damaged_runs.py": "run directories with random damage",
    "test_packaging.py": "pyproject.toml, lock files, imports",
    "test_rooms.py": "this file",
}
"""Test file that has no module of its name -> what it is about."""


def files(folder, pattern):
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob(pattern))}


def own_test(module):
    room, _, name = module.rpartition("/")
    return f"{room}/test_{name}".lstrip("/")


MODULES = [m for m in files(ROOT / "common", "*.py") if not m.endswith("__.py")]
TESTS = files(ROOT / "tests" / "common", "test_*.py")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_a_test_of_its_name_or_a_reason(module):
    if module not in ELSEWHERE:
        assert own_test(module) in TESTS, "add this test, or a reason to ELSEWHERE"
    else:
        assert own_test(module) not in TESTS, "take it from ELSEWHERE"
        assert (ROOT / "tests" / "common" / ELSEWHERE[module][0]).is_file()


def test_exceptions_are_about_files_that_exist():
    assert set(ELSEWHERE) <= set(MODULES)
    assert set(SCENARIOS) <= set(TESTS)


def test_every_other_test_has_a_module_of_its_name():
    assert set(TESTS) - {own_test(module) for module in MODULES} == set(SCENARIOS)
