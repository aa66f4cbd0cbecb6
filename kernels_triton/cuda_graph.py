"""CUDA graphs: all kernels that a function launches, launched again in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns a function without arguments into one that repeats its work on the same tensors."""


def cuda_graphs() -> Capture:
    """A `cuda_graph` for graphs that share one pool of memory, as large as the largest needs.

    Such graphs must be replayed one at a time on one stream, and must leave their results in
    tensors made outside of them, since each graph overwrites what another one has allocated.
    """
    return functools.partial(cuda_graph, pool=torch.cuda.graph_pool_handle())


def cuda_graph(f: Callable[[], Any], pool: Any = None) -> Callable[[], None]:
    """A function that launches the kernels of f() again, without the time that Python takes.

    f runs twice before it is captured, so that everything is compiled and allocated by then.
    pool: a torch.cuda.graph_pool_handle() that several graphs share; None = a pool of its own.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f()
        f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        f()
    return graph.replay
