"""Overrides and recipes: typing by annotation, strictness, and one line for every mistake."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config, MismatchConfig, RolloutConfig, TaskConfig, overrides
from common.errors import UserError


def changed(*arguments):
    _, changes, _ = overrides.parse(arguments)
    return overrides.apply(Config(), changes)


def test_parse_separates_recipe_overrides_and_the_rest():
    argv = ["train", "--config=a.py", "--config.num_steps", "4", "--run=r", "--configs=x"]
    argv += ["--config.num_steps=5", "--config.task.args=a=b"]
    file, changes, rest = overrides.parse(argv)
    assert file == "a.py"
    assert changes == {"num_steps": "5", "task.args": "a=b"}  # the last one holds
    assert rest == ["train", "--run=r", "--configs=x"]


@pytest.mark.parametrize(
    ("text", "group", "name", "value"),
    [
        ("num_steps=40", "", "num_steps", 40),
        ("name=4", "", "name", "4"),
        ("rollout.temperature=1", "rollout", "temperature", 1.0),
        ("model.qk_norm=False", "model", "qk_norm", False),
        ("model.tie_embeddings=no", "model", "tie_embeddings", False),
        ("mismatch.budgets=4,8,16", "mismatch", "budgets", (4, 8, 16)),
        ("mismatch.budgets=(4, 8)", "mismatch", "budgets", (4, 8)),
        ("mismatch.budgets=[4]", "mismatch", "budgets", (4,)),
        ("mismatch.budgets=4", "mismatch", "budgets", (4,)),
        ("mismatch.budgets=()", "mismatch", "budgets", ()),
        ("learner.mesh=1,2,4", "learner", "mesh", (1, 2, 4)),
        ("warmup.stages=((9, 8, 2, 6, 0.5),)", "warmup", "stages", ((9.0, 8.0, 2.0, 6.0, 0.5),)),
        ('task.args={"a": true}', "task", "args", {"a": True}),
        ("task.args={'a': True}", "task", "args", {"a": True}),
        ("task.args.min_entries=24", "task", "args", {"min_entries": 24}),
        ("task.args.inner.kind=long", "task", "args", {"inner": {"kind": "long"}}),
    ],
)
def test_values_are_typed_by_the_annotation(text, group, name, value):
    config = changed("--config." + text)
    got = getattr(getattr(config, group) if group else config, name)
    assert got == value
    assert type(got) is type(value)


def test_one_key_of_a_dict_leaves_the_others_and_the_original_alone():
    config = Config(task=TaskConfig(args={"a": 1, "inner": {"x": 1, "y": 2}}))
    new = overrides.apply(config, {"task.args.inner.x": "5", "task.args.b": "2"})
    assert new.task.args == {"a": 1, "b": 2, "inner": {"x": 5, "y": 2}}
    assert config.task.args == {"a": 1, "inner": {"x": 1, "y": 2}}


def test_settings_that_only_fit_together_are_changed_together():
    # 3 prompts x 5 samples = 15 rows: neither change alone splits into 3 minibatches (64 do not).
    config = changed(
        "--config.grpo.num_minibatches=3",
        "--config.rollout.prompts_per_step=3",
        "--config.rollout.samples_per_prompt=5",
    )
    assert config.grpo.num_minibatches == 3


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--config.rollout.temprature=1", ["did you mean --config.rollout.temperature?"]),
        ("--config.rollout.tau=0.9", ["did you mean --config.mismatch.tau?"]),
        ("--config.num_step=3", ["did you mean --config.num_steps?"]),
        ("--config.rolout.page_size=3", ["did you mean --config.rollout.page_size?"]),
        ("--config.zzz=3", ["--config.zzz: no such setting", "sparrow help config"]),
        ("--config.=3", ["no such setting"]),
        ("--config.rollout=3", ["group of settings", "--config.rollout.engine="]),
        ("--config.num_steps.x=3", ["did you mean --config.num_steps?"]),
        ("--config.num_steps=many", ["--config.num_steps=many", "a whole number"]),
        ("--config.num_steps=2.0", ["--config.num_steps=2.0", "a whole number"]),
        ("--config.rollout.temperature=hot", ["expected a number", "hot"]),
        ("--config.rollout.temperature=nan", ["expected a number", "nan"]),
        ("--config.grpo.normalize_std=maybe", ["expected true, false or auto", "maybe"]),
        ("--config.model.qk_norm=maybe", ["expected true or false", "maybe"]),
        ("--config.mismatch.budgets=4,x", ["whole numbers with commas", "4,x"]),
        ("--config.mismatch.budgets=4,8.5", ["expected a whole number, got 8.5"]),
        ("--config.learner.mesh=1,2", ["3 whole numbers", "1,2"]),
        ("--config.task.args=[1]", ["expected a dict"]),
        (
            "--config.rollout.temperature=-1",
            ["config.rollout", "temperature=-1.0", "at least 0.01"],
        ),
        ("--config.grpo.correction=tis", ["config.grpo", "correction='tis'", "token_tis"]),
        ("--config.num_steps", ["expected a value", "--config.num_steps=VALUE"]),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_change(argument, parts):
    with pytest.raises(UserError) as caught:
        changed(argument)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@given(
    st.integers(1, 10**6),
    st.floats(0.01, 100),
    st.sets(st.integers(0, 999), min_size=1),
    st.dictionaries(st.text(min_size=1), st.integers() | st.text() | st.lists(st.booleans())),
)
def test_to_dict_and_back_is_the_same_config(steps, temperature, budgets, args):
    config = Config(
        num_steps=steps,
        rollout=RolloutConfig(temperature=temperature),
        mismatch=MismatchConfig(budgets=tuple(sorted(budgets))),
        task=TaskConfig(args=args),
    )
    assert overrides.from_dict(json.loads(json.dumps(overrides.to_dict(config)))) == config
    assert overrides.differences(config, config) == []


def test_from_dict_is_strict_but_reads_older_files():
    values = overrides.to_dict(Config())
    del values["mismatch"]["tau"]
    assert overrides.from_dict(values) == Config()
    for where, name, value, part in [
        (values["rollout"], "pagesize", 8, "rollout.pagesize: no such setting; did you mean rollo"),
        (values["rollout"], "page_size", "8", "rollout.page_size: expected a whole number"),
        (values["model"], "qk_norm", 1, "model.qk_norm: expected true or false"),
        (values, "num_steps", 0, "num_steps=0: expected at least 1"),
        (values, "task", 3, "task.: expected a JSON object"),
    ]:
        before = dict(where)
        where[name] = value
        with pytest.raises(UserError, match="old/config.json") as caught:
            overrides.from_dict(values, source="old/config.json")
        assert part in str(caught.value)
        where.clear()
        where.update(before)


def test_differences_name_settings_and_dict_entries():
    new = changed("--config.num_steps=3", "--config.task.args.n=1", "--config.mismatch.budgets=4")
    expected = ["num_steps", "mismatch.budgets", "task.args.n"]
    assert overrides.differences(Config(), new) == expected


def test_help_lists_every_setting_with_default_and_meaning():
    text = overrides.describe()
    for group in (
        f for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default_factory)
    ):
        for f in dataclasses.fields(group.default_factory):
            assert f"--config.{group.name}.{f.name}=" in text
            assert f.metadata["doc"] in text
    assert "--config.mismatch.budgets=4,8,12,16,24,32    whole numbers with commas between" in text
    assert "one of jax, torch, vllm" in text


def test_a_recipe_is_run_and_may_build_on_another(tmp_path):
    recipe = tmp_path / "r.py"
    recipe.write_text(
        "import dataclasses\nfrom common.config import Config\n"
        "@dataclasses.dataclass\nclass Local:\n    steps: int = 7\n"
        "def get_config():\n    return Config(num_steps=Local().steps)\n"
    )
    assert overrides.load(recipe) == Config(num_steps=7)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x = 1\n", ["defines no function get_config()"]),
        ("def get_config():\n    return 3\n", ["returned int: expected Config"]),
        ("def get_config():\n    y = 1\n    return y / 0\n", [":3: ZeroDivisionError"]),
        ("def get_config(:\n", [":1: SyntaxError"]),
        ("import nothing_like_this\n", [":1: ModuleNotFoundError"]),
        (
            "from common.config import Config\n\ndef get_config():\n    return Config(num_steps=0)",
            [":4: num_steps=0: expected at least 1"],
        ),
        (
            "from common.config import Config\ndef get_config():\n    return Config(num_step=0)\n",
            [":3: TypeError", "num_step"],
        ),
    ],
)
def test_a_broken_recipe_is_one_line_with_its_line_number(tmp_path, text, parts):
    recipe = tmp_path / "broken.py"
    recipe.write_text(text)
    with pytest.raises(UserError) as caught:
        overrides.load(recipe)
    assert "\n" not in str(caught.value)
    for part in ["broken.py", *parts]:
        assert part in str(caught.value)


def test_a_missing_recipe_offers_the_nearest(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.py").write_text("")
    (tmp_path / "configs" / "qwen3_8b.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such file; did you mean --config=configs/demo.py\?"):
        overrides.load("configs/dmo.py")
    with pytest.raises(UserError, match=r"did you mean --config=configs/qwen3_8b.py\?"):
        overrides.load("qwen3_8")


def test_a_setting_can_be_left_to_another():
    assert "--config.grpo.normalize_std=auto    true, false or auto" in overrides.describe()
    for text, value in (("auto", None), ("no", False), ("true", True)):
        config = overrides.apply(Config(), {"grpo.normalize_std": text})
        assert config.grpo.normalize_std is value
        assert overrides.from_dict(overrides.to_dict(config)) == config
