"""Kernels that are launched together: a CUDA graph of what a function does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes a function without arguments into one that does the same on the same tensors again."""


def cuda_graphs() -> Capture:
    """A `cuda_graph` whose graphs share one pool of memory: it holds the largest, not the sum.

    For graphs that are replayed one at a time, on one stream, and that leave their results in
    tensors made outside them: what a graph has allocated is overwritten by the next.
    """
    return functools.partial(cuda_graph, pool=torch.cuda.graph_pool_handle())


def cuda_graph(f: Callable[[], Any], pool: Any = None) -> Callable[[], None]:
    """Repeats the kernels that f() launches, with the same tensors and without Python's time.

    f runs twice before it is captured, so that all that it compiles or allocates once is there.
    pool: a torch.cuda.graph_pool_handle() of graphs that share their memory; None: its own.
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
