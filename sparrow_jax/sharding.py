"""Devices: one mesh with axes data, fsdp and tensor; a single device is the 1 x 1 x 1 mesh."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from common.errors import UserError
from sparrow_jax.model import PARTITION

BATCH = P(("data", "fsdp"))


def make_mesh(shape: tuple[int, int, int]) -> Mesh:
    """Mesh of the first data x fsdp x tensor devices."""
    needed, have = shape[0] * shape[1] * shape[2], len(jax.devices())
    if needed > have:
        raise UserError(f"learner.mesh={shape} needs {needed} devices, this process sees {have}")
    names = ("data", "fsdp", "tensor")
    devices = jax.devices()[:needed]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 3, devices=devices)


def shard_params(params, mesh: Mesh):
    """Place every parameter by its entry of PARTITION (matched by its own name).

    UserError if an axis of the mesh does not divide what is to be split over it.
    """

    def place(path, value):
        spec = partition(path)
        for size, axis in zip(value.shape, spec, strict=False):
            if axis and size % mesh.shape[axis]:
                raise UserError(
                    f"learner.mesh={tuple(mesh.shape.values())}: cannot split {size} of "
                    f"{_parameter(path)} {list(value.shape)} over {axis}={mesh.shape[axis]}; "
                    f"expected a {axis} that divides it"
                )
        return jax.device_put(value, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, params)


def partition(path) -> P:
    """Entry of PARTITION for a parameter, found by the last named step of its tree path."""
    return PARTITION[_parameter(path)]


def _parameter(path) -> str:
    names = [str(getattr(p, "key", getattr(p, "name", ""))) for p in path]
    return next(name for name in reversed(names) if name in PARTITION)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over data and fsdp."""
    return NamedSharding(mesh, BATCH)
