"""Kernels that are launched together: one CUDA graph of what a function does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def cuda_graph(f: Callable[[], Any]) -> Callable[[], None]:
    """Repeats the kernels that f() launches, with the same tensors and without Python's time.

    f runs twice before it is captured, so that all that it compiles or allocates once is there.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f()
        f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph.replay
