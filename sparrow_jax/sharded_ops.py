"""Kernels on a mesh: every device works on its own rows and heads.

XLA cannot split a Pallas call, so each operation runs under shard_map, with the arrays placed as
placement.py says. Page ids are local: each share of the pool has its own page 0, 1, ... The output
head is gathered, because every device needs all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels_pallas.ops import Ops
from sparrow_jax.placement import HEADS, LANDMARKS, POOL, QUERIES, ROWS

Function = Callable[..., Any]


def shard_ops(ops: Ops, mesh: Mesh) -> Ops:
    """The same operations for arrays that are split over `mesh`."""
    if mesh.size == 1:
        return ops
    head = (P(ROWS, None), P(None, None), P(ROWS))
    specs: dict[str, tuple[tuple[P, ...], Any]] = {
        "select_pages": (
            (P(ROWS, HEADS, None), LANDMARKS, P(), P(ROWS, None), P(ROWS), P(ROWS)),
            (P(ROWS, HEADS, None), P(ROWS)),
        ),
        "append_kv": (
            (POOL, LANDMARKS, P(), QUERIES, QUERIES, P(ROWS, None), P(ROWS), P(ROWS)),
            (POOL, LANDMARKS),
        ),
        "token_logprob": (head, (P(ROWS), P(ROWS))),
        "acceptance_overlap": ((head[0], *head), (P(ROWS), P(ROWS))),
    }
    wrapped = {name: _wrap(getattr(ops, name), mesh, *s) for name, s in specs.items()}
    return dataclasses.replace(
        ops,
        name=f"{ops.name}, on {mesh.size} devices",
        sparse_decode=_decode(ops.sparse_decode, mesh),
        flash_prefill=_prefill(ops.flash_prefill, mesh),
        **wrapped,
    )


def _map(f: Function, mesh: Mesh, inputs: Any, outputs: Any) -> Function:
    return jax.shard_map(f, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _wrap(f: Function, mesh: Mesh, inputs: tuple[P, ...], outputs: Any) -> Function:
    """f(*arrays, **static) under shard_map; the temperature is passed as an array."""

    def g(*arrays: Any, temperature: Any = None, **static: Any) -> Any:
        if temperature is None:
            return _map(lambda *a: f(*a, **static), mesh, inputs, outputs)(*arrays)
        with_temperature = lambda t, *a: f(*a, temperature=t, **static)  # noqa: E731
        return _map(with_temperature, mesh, (P(), *inputs), outputs)(temperature, *arrays)

    return g


def _decode(f: Function, mesh: Mesh) -> Function:
    """sparse_decode; page_ids is [B, P] (dense) or [B, K, J] (pages selected for each KV head)."""

    def g(q, kv, layer, page_ids, start_B, length_B, **static) -> Any:
        ids = P(ROWS, None) if page_ids.ndim == 2 else P(ROWS, HEADS, None)
        inputs = (QUERIES, POOL, P(), ids, P(ROWS), P(ROWS))
        outputs = (QUERIES, P(ROWS, None, HEADS))
        return _map(lambda *a: f(*a, **static), mesh, inputs, outputs)(
            q, kv, layer, page_ids, start_B, length_B
        )

    return g


def _prefill(f: Function, mesh: Mesh) -> Function:
    """flash_prefill; every device has all budgets of a replay and the mask of its own rows."""

    def g(q, k, v, *, budget_T=None, sparse_BT=None, **static) -> Any:
        if budget_T is None:
            return _map(lambda *a: f(*a, **static), mesh, (QUERIES,) * 3, QUERIES)(q, k, v)

        def replay(q, k, v, budget_T, sparse_BT) -> Any:
            return f(q, k, v, budget_T=budget_T, sparse_BT=sparse_BT, **static)

        inputs = (QUERIES, QUERIES, QUERIES, P(None), P(ROWS, None))
        return _map(replay, mesh, inputs, QUERIES)(q, k, v, budget_T, sparse_BT)

    return g
