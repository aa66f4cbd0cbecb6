"""Checkpoints travel: written on one mesh, restored and gone on with on another.

The eight devices are forced ones in child processes, which call functions of this file: the number
of devices of a process is fixed. The single device is also the process of the tests.
"""

import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from common.cli import command_line
from common.config import Config, LearnerConfig, ModelConfig
from common.model.geometry import Geometry
from common.records import metrics
from common.tasks import registry
from sparrow_jax.checkpoint import Checkpoints
from sparrow_jax.learner import Learner
from sparrow_jax.placement import Placement
from sparrow_jax.toy.random_init import random_decoder
from tests.conftest import ROOT

MODEL = ModelConfig(
    vocab_size=24, num_layers=2, hidden_size=16, intermediate_size=24, num_heads=8, num_kv_heads=4,
    head_dim=8, tie_embeddings=False,
)  # fmt: skip
G = Geometry.from_config(MODEL)
EXTRA = {"step": 12, "version": 12, "controller": {"scale": [0.1, 1e-17, None]}}
WRITER, ONE = (1, 8, 1), (1, 1, 1)
MESHES = [ONE, (2, 4, 1), (8, 1, 1), (2, 2, 2), WRITER]


def in_child(function, *arguments):
    """What function(*arguments) of this file returns (JSON) in a process of eight devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = {
        **os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # fmt: skip
    program = (
        "import json, sys; from tests.jax import test_checkpoint_meshes as tests; "
        "print(json.dumps(getattr(tests, sys.argv[1])(*sys.argv[2:])))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, function, *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def named(learner):
    """{name: (array, its partition)} of weights, both moments and the counters."""
    found = {}
    trees = {"params": nnx.to_pure_dict(learner.params), "opt_state": learner._opt_state}
    for path, x in jax.tree_util.tree_flatten_with_path(trees)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        found[name] = x, learner.placement.weight(path).spec if x.ndim else P()
    return found


@functools.cache
def model():
    return random_decoder(MODEL)


def a_learner(mesh, seed):
    """A learner on `mesh` with random weights, moments and counters, all from the seed."""
    config = Config(model=MODEL, learner=LearnerConfig(mesh=mesh))
    learner = Learner(*model(), config, jnp.dtype("float32"))
    rng = np.random.default_rng(seed)

    def draw(x):
        drawn = rng.normal(size=x.shape) if x.ndim else rng.integers(2, 10**6)
        return jax.device_put(np.asarray(drawn, x.dtype), x.sharding)

    learner.load_state_dict(jax.tree.map(draw, learner.state_dict()))
    return learner


@functools.cache
def state_of(seed):
    """{name: array on the host}."""
    return {name: np.asarray(x) for name, (x, _) in named(a_learner(ONE, seed)).items()}


def faults(learner, mesh, seed):
    """What is not bit by bit the state of `seed`, and what is not placed as PARTITION says."""
    mesh, found, wanted = Placement.on_devices(mesh).mesh, [], state_of(seed)
    assert named(learner).keys() == wanted.keys()
    for name, (x, spec) in named(learner).items():
        want, placed = wanted[name], NamedSharding(mesh, spec)
        where = placed.devices_indices_map(x.shape)
        if (x.dtype, x.shape, np.asarray(x).tobytes()) != (want.dtype, want.shape, want.tobytes()):
            found.append(f"{name}: other bits")
        elif x.sharding.mesh != mesh or not x.sharding.is_equivalent_to(placed, x.ndim):
            found.append(f"{name}: lies on {dict(x.sharding.mesh.shape)} by {x.sharding.spec}")
        elif any(s.data.tobytes() != want[where[s.device]].tobytes() for s in x.addressable_shards):
            found.append(f"{name}: a device has another part")
    return found


def save(directory, learner, step, extra):
    with contextlib.closing(Checkpoints(directory, learner, 2)) as checkpoints:
        checkpoints.save(step, extra)


def restore(directory, mesh, spoil=lambda learner, state: state):
    """[extra, faults against seed 12, words on stderr]; spoil changes what the learner loads."""
    learner = a_learner(mesh, seed=99)
    load = learner.load_state_dict
    learner.load_state_dict = lambda state: load(spoil(learner, state))
    with contextlib.redirect_stderr(io.StringIO()) as words:
        with contextlib.closing(Checkpoints(directory, learner, 2)) as checkpoints:
            extra = checkpoints.restore()
    return [extra, faults(learner, mesh, seed=12), words.getvalue()]


def on_the_old_mesh(learner, state):
    old = Placement.on_devices(WRITER).mesh
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(old, x.sharding.spec)), state)


def replicated(learner, state):
    return jax.tree.map(lambda x: jax.device_put(x, learner.placement.everywhere), state)


def moments_swapped(learner, state):
    first, *moments, last = state["opt_state"]
    half = len(moments) // 2
    return state | {"opt_state": [first, *moments[half:], *moments[:half], last]}


def moments_forgotten(learner, state):
    return state | {"opt_state": learner.state_dict()["opt_state"]}


def keys_for_values(learner, state):
    layers = state["params"]["layers"]
    layers |= {"k_LDKH": layers["v_LDKH"], "v_LDKH": layers["k_LDKH"]}
    return state


def least_bit_of_a_norm(learner, state):
    state["params"]["final_norm_D"] = jnp.nextafter(state["params"]["final_norm_D"], 9.0)
    return state


OLD_PLACE = "params.embed_VD: lies on {'data': 1, 'fsdp': 8, 'tensor': 1} by "
PLANTED = {  # name: (a fault that a test must find, number of the 44 arrays that it changes)
    on_the_old_mesh: (OLD_PLACE, 44),
    replicated: ("params.layers.q_LDNH: lies on {'data': 2, 'fsdp': 2, 'tensor': 2} by ", 27),
    moments_swapped: ("opt_state.1.0.mu.embed_VD: other bits", 28),
    moments_forgotten: ("opt_state.1.0.nu.layers.o_LNHD: other bits", 30),
    keys_for_values: ("params.layers.k_LDKH: other bits", 2),
    least_bit_of_a_norm: ("params.final_norm_D: other bits", 1),
}


def restore_everywhere(directory):
    """In a process of eight devices: what `restore` says after each way from mesh to mesh."""
    directory, found = Path(directory), {"ways": {}, "planted": {}, "damaged": {}}
    written, other = directory / "written", directory / "other"
    save(written, a_learner(WRITER, 3), 3, {"older": True})
    save(written, a_learner(WRITER, 12), 12, EXTRA)
    save(other, a_learner((2, 2, 2), 12), 12, EXTRA)
    for mesh in MESHES:
        found["ways"][f"to {mesh}"] = restore(written, mesh)
    found["ways"]["back"] = restore(other, WRITER)
    for spoil in PLANTED:
        found["planted"][spoil.__name__] = restore(written, (2, 2, 2), spoil)
    nowhere = lambda target: jax.tree.map(lambda _: ocp.ArrayRestoreArgs(), target)  # noqa: E731
    with mock.patch.object(ocp.checkpoint_utils, "construct_restore_args", nowhere):
        found["planted"]["orbax_not_told_where"] = restore(written, (2, 2, 2))
    for mesh in (ONE, (2, 4, 1)):
        folder = Path(shutil.copytree(written, directory / f"damaged {mesh}"))
        damage(folder)
        found["damaged"][str(mesh)] = restore(folder, mesh)
    return found


def damage(folder):
    """Change one bit of the largest file of step 12."""
    files = [p for p in (folder / "step_00000012").rglob("*") if p.is_file()]
    victim = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)


@pytest.fixture(scope="module")
def travels(tmp_path_factory):
    """(directory of checkpoints that eight devices wrote, what they found)."""
    directory = tmp_path_factory.mktemp("travels")
    return directory / "written", in_child("restore_everywhere", directory)


def test_a_checkpoint_is_restored_bit_equal_and_placed_anew_on_every_mesh(travels):
    ways = travels[1]["ways"]
    assert len(ways) == len(MESHES) + 1
    assert ways == dict.fromkeys(ways, [EXTRA, [], ""])


def test_more_devices_wrote_it_than_there_are_here(travels):
    assert len(jax.devices()) < 8
    assert restore(travels[0], ONE) == [EXTRA, [], ""]


FOUND = {f.__name__: words for f, words in PLANTED.items()}


@pytest.mark.parametrize("name", [*FOUND, "orbax_not_told_where"])
def test_a_planted_fault_is_seen(travels, name):
    extra, found, _ = travels[1]["planted"][name]
    words, count = FOUND.get(name, FOUND["on_the_old_mesh"])
    assert extra == EXTRA and len(found) == count, found
    assert any(fault.startswith(words) for fault in found), found


def test_damage_is_seen_on_every_mesh_and_the_one_before_is_used(travels, tmp_path):
    here = Path(shutil.copytree(travels[0], tmp_path / "here"))
    damage(here)
    for extra, found, words in [restore(here, ONE), *travels[1]["damaged"].values()]:
        assert extra == {"older": True}
        assert words.count("\n") == 1 and "step_00000012 is damaged: arrays/" in words
        assert "has another checksum" in words
        assert len(found) == 44 and all("other bits" in fault for fault in found)


# A run of `sparrow train` that moves.

RECIPE = """
from common.config import *

def get_config():
    return Config(
        num_steps=4,
        eval_every=0,
        checkpoint_every=2,
        model=ModelConfig(num_layers=2, hidden_size=32, intermediate_size=32, num_heads=4,
                          num_kv_heads=2, head_dim=16, qk_gain=1.5, vocab_size=16),
        task=TaskConfig(args={"num_symbols": 4, "min_entries": 3, "max_entries": 4,
                              "header_tokens": 4}),
        rollout=RolloutConfig(page_size=4, num_dense_layers=0, prompts_per_step=2,
                              samples_per_prompt=8, max_prompt_tokens=32, max_response_tokens=32,
                              num_slots=16, prefill_chunk=32, schedule="schedule.json"),
        learner=LearnerConfig(learning_rate=1e-3, tokens_per_microbatch=512, length_buckets=(64,),
                              remat=False),
        mismatch=MismatchConfig(bin_tokens=16, every=0),
    )
"""
BINS = [{"start": 0, "end": 16, "k": 1}, {"start": 16, "end": 32, "k": 2}]
SCHEDULE = {"format": "sparrow-schedule-1", "page_size": 4, "bin_tokens": 16, "bins": BINS}


class Task:
    """Takes the place of the task's score: the share of odd tokens, a signal at every step.

    tokens: what was sampled, step by step. stop_at: Ctrl-C at that step, after its rollout.
    """

    def __init__(self):
        self.tokens, self.stop_at = [], None

    def score(self, task, rollout, pool):
        if len(self.tokens) == self.stop_at:
            raise KeyboardInterrupt
        self.tokens.append(rollout.tokens_BT.tolist())
        odd = rollout.response_mask_BT & (rollout.tokens_BT % 2 == 1)
        return odd.sum(1) / rollout.response_mask_BT.sum(1)


def run_on_two_meshes(folder):
    """In a process of eight devices: runs that stay and runs that move, and what they sampled."""
    os.chdir(folder)
    Path("tiny.py").write_text(RECIPE)
    Path("schedule.json").write_text(json.dumps(SCHEDULE))
    task, sampled, codes = Task(), {}, {}
    registry.score = task.score

    def train(run, mesh, flags="", stop_at=None):
        task.stop_at, task.tokens = stop_at, sampled.setdefault(run, [])
        mesh = ",".join(map(str, mesh))
        line = f"train --config=tiny.py --run={run} --config.learner.mesh={mesh} {flags}"
        with contextlib.redirect_stderr(io.StringIO()) as words:
            codes[f"{run} on {mesh} {flags}"] = command_line.main(line.split()), words.getvalue()

    train("whole", ONE)
    train("leaves", WRITER, stop_at=2)
    shutil.copytree("leaves", "forgets")
    sampled["forgets"] = list(sampled["leaves"])
    train("leaves", ONE, "--config.learner.beta2=0.9")
    train("leaves", ONE)
    with mock.patch.object(Learner, "load_state_dict", weights_only(Learner.load_state_dict)):
        train("forgets", ONE)
    train("arrives", ONE, stop_at=2)
    train("arrives", WRITER)
    return [codes, sampled]


def weights_only(load):
    """A fault: the moments of the optimizer begin at zero."""
    return lambda self, state: load(self, moments_forgotten(self, state))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, *in_child("run_on_two_meshes", folder)


def test_only_the_mesh_may_change_when_a_run_goes_on(runs):
    codes = {name: code for name, (code, _) in runs[1].items()}
    refused = "leaves on 1,1,1 --config.learner.beta2=0.9"
    stopped = ["leaves on 1,8,1 ", "arrives on 1,1,1 "]
    assert codes == dict.fromkeys(codes, 0) | {refused: 2} | dict.fromkeys(stopped, 130)
    assert len(codes) == 7
    assert "it differs in learner.beta2: " in runs[1][refused][1]


def deviations(folder, run):
    """Largest relative deviation of the record of each step from that of the run that stayed.

    Numbers below 1e-3 count as 1e-3; all that is not a number must be the same.
    """
    whole, moved = (metrics.comparable(metrics.read_metrics(folder / r)) for r in ("whole", run))
    assert [r["step"] for r in moved] == [r["step"] for r in whole] == [0, 1, 2, 3]
    found = []
    for a, b in zip(whole, moved, strict=True):
        (a, tree), (b, same) = jax.tree.flatten(a), jax.tree.flatten(b)
        assert tree == same
        a, b = np.array(a, float), np.array(b, float)
        found.append(float((abs(a - b) / np.maximum(abs(a), 1e-3)).max()))
    return found


@pytest.mark.parametrize("run", ["leaves", "arrives"])
def test_a_run_that_moved_has_the_metrics_of_the_one_that_stayed(runs, run):
    """The sampled tokens are the same; float32 numbers within 1e-4, by rounding only."""
    folder, _, sampled = runs
    assert sampled[run] == sampled["whole"] and len(sampled[run]) == 4
    records = metrics.read_metrics(folder / "whole")
    assert min(r["grpo/grad_norm"] for r in records) > 0.1
    assert max(deviations(folder, run)) < 1e-4
    a, b = (load_file(folder / r / "model" / "model.safetensors") for r in ("whole", run))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_run_that_forgot_its_moments_on_the_way_is_seen(runs):
    folder, _, sampled = runs
    found = deviations(folder, "forgets")
    assert max(found[:2]) < 1e-4 and min(found[2:]) > 1e-2
    assert sampled["forgets"][:3] == sampled["whole"][:3], "weights are as they were at step 2"
