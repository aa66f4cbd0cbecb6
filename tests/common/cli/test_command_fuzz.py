"""Random command lines, seeded: read and typed in this process, refused in one line or taken."""

import random

from common.cli import command_line
from common.cli.commands import COMMANDS
from common.config import Config, overrides
from common.errors import UserError, one_line

VALUES = (
    "", "0", "-1", "nan", "inf", "1e309", "9" * 5000, "\udcff", "\x00", "a=b", "-", "=", "--=",
    "None", "[", "[" * 100_000, "-" * 100_000, "('a',", "{}", "__import__('os')", "../x",
    "/dev/null", "true", "1_0", "0x10", "1e30", "k=2", "jax",
)  # fmt: skip
KEYS = (
    "rollout.temperature", "rollout.tau", "rollout", "rollout.schedule", "task.args",
    "task.args.x", "grpo.kl_coef", "nothing.at", "", "a.b.c.d", "model.path", "seed",
)  # fmt: skip


def words(rng, command):
    """Up to five flags, settings and names, known and unknown, with values of every kind."""
    names = [flag.name for flag in command.flags] + ["no_such_flag"]
    for _ in range(rng.randint(0, 5)):
        value, kind = rng.choice(VALUES), rng.random()
        if kind < 0.4:
            yield f"--{rng.choice(names)}={value}"
        elif kind < 0.5:
            yield f"--{rng.choice(names)}"
        elif kind < 0.9:
            yield f"--config.{rng.choice(KEYS)}={value}"
        else:
            yield value


def test_random_command_lines_end_in_one_line():
    rng, refused = random.Random(7), 0
    for _ in range(300):
        command = COMMANDS[rng.choice(sorted(COMMANDS))]
        argv = list(words(rng, command))
        try:
            arguments = command_line.parse_arguments(command, argv)
            overrides.apply(Config(), arguments.overrides)
        except UserError as error:
            assert "\n" not in one_line(error)
            refused += 1
    assert refused > 150  # most of them cannot be right


def test_every_value_of_a_free_setting_is_read_without_a_traceback():
    for value in VALUES:
        try:
            overrides.apply(Config(), {"task.args.x": value})
        except UserError:
            pass
