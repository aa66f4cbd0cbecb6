"""Where arrays lie: one mesh of devices, and how each kind of array is split over it.

    axis of the mesh       data            fsdp                  tensor
    rows of a batch        split           split                 copied
    pages, landmarks       split           split                 split by KV head
    weights                copied          split by width D      split by head, F or V
    norms, counters        copied          copied                copied

Nothing else in this backend decides where an array lies. One device is the 1 x 1 x 1 mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from common.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROWS, HEADS = ("data", "fsdp"), "tensor"
POOL = P(None, HEADS, ROWS)
LANDMARKS = P(None, ROWS, HEADS, None)
QUERIES = P(ROWS, None, HEADS, None)
PARTITION = {
    "embed_VD": P("tensor", "fsdp"),
    "head_VD": P("tensor", "fsdp"),
    "final_norm_D": P(None),
    "attn_norm_LD": P(None, None),
    "mlp_norm_LD": P(None, None),
    "q_LDNH": P(None, "fsdp", "tensor", None),
    "k_LDKH": P(None, "fsdp", "tensor", None),
    "v_LDKH": P(None, "fsdp", "tensor", None),
    "o_LNHD": P(None, "tensor", None, "fsdp"),
    "gate_LDF": P(None, "fsdp", "tensor"),
    "up_LDF": P(None, "fsdp", "tensor"),
    "down_LFD": P(None, "tensor", "fsdp"),
    "q_norm_LH": P(None, None),
    "k_norm_LH": P(None, None),
}
"""Partition of every parameter, by the last part of its name."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh, and where rows, weights and everything else lie on it."""

    mesh: Mesh

    @classmethod
    def on_devices(cls, shape: tuple[int, int, int]) -> Placement:
        """The mesh of the first data x fsdp x tensor devices.

        Raises: UserError if this process has fewer.
        """
        needed, have = shape[0] * shape[1] * shape[2], len(jax.devices())
        if needed > have:
            raise UserError(
                f"learner.mesh={shape} needs {needed} devices, this process sees {have}"
            )
        devices = jax.devices()[:needed]
        return cls(jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices))

    @property
    def rows(self) -> NamedSharding:
        """Sharding of an array with the rows of a batch as its first axis."""
        return NamedSharding(self.mesh, P(ROWS))

    @property
    def everywhere(self) -> NamedSharding:
        """Sharding of an array that every device holds as a whole."""
        return NamedSharding(self.mesh, P())

    def weight(self, path: tuple[Any, ...]) -> NamedSharding:
        """Sharding of a parameter, found by the last part of its tree path that PARTITION has."""
        return NamedSharding(self.mesh, PARTITION[_parameter(path)])

    def put_weights(self, params: Any) -> Any:
        """A tree of parameters, each on the devices that hold its parts.

        Raises: UserError if an axis of the mesh does not divide the axis that it splits.
        """

        def put(path: tuple[Any, ...], value: Any) -> jax.Array:
            where = self.weight(path)
            for size, axis in zip(value.shape, where.spec, strict=False):
                if axis and size % self.mesh.shape[axis]:
                    raise UserError(
                        f"learner.mesh={tuple(self.mesh.shape.values())}: cannot split {size} of "
                        f"{_parameter(path)} {list(value.shape)} over "
                        f"{axis}={self.mesh.shape[axis]}; expected a {axis} that divides it"
                    )
            return jax.device_put(value, where)

        return jax.tree_util.tree_map_with_path(put, params)

    def put_scalars(self, tree: Any) -> Any:
        """The same tree with its scalars on every device; larger arrays stay where they are."""
        return jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, self.everywhere), tree)

    def put_rows(self, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Arrays split by rows; zero rows are added until every device gets the same number."""
        shards = self._num_row_shards()
        pad = -len(next(iter(arrays.values()))) % shards
        padded = {name: np.pad(x, ((0, pad), (0, 0))) for name, x in arrays.items()}
        return {name: jax.device_put(x, self.rows) for name, x in padded.items()}

    def put_even_rows(self, x: np.ndarray) -> np.ndarray | jax.Array:
        """One array split by rows; if the devices cannot share them evenly, the array as it was."""
        return x if len(x) % self._num_row_shards() else jax.device_put(x, self.rows)

    def _num_row_shards(self) -> int:
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]


def on_one_device(x: jax.Array) -> jax.Array | np.ndarray:
    """The array itself if one device holds it, else a copy on the host.

    Other frameworks cannot read an array that is split over devices.
    """
    return x if len(x.sharding.device_set) == 1 else np.asarray(x)


def _parameter(path: tuple[Any, ...]) -> str:
    names = [str(getattr(p, "key", getattr(p, "name", ""))) for p in path]
    return next(name for name in reversed(names) if name in PARTITION)
