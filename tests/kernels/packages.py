"""Both kernel packages behind one interface: the same test runs with PALLAS, EAGER and TRITON.

Operations take and give arrays as the checks of ladder.py do. Tunings are so small that the tiny
inputs of the tests go through every loop and use every buffer again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from types import ModuleType

import pytest

from kernels_pallas import tuning as pallas
from kernels_triton import tuning as triton
from tests.kernels import ladder


class Package:
    """Where operations of one name differ; the rest is in the two classes below."""

    folder: str
    small: dict

    def __init__(self, name):
        self.__name__ = name  # by which pytest names the parameter

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.folder}.{name}")

    def function(self, name: str):
        """The operation itself, on jax arrays or tensors."""
        return getattr(self.module(name), name)

    def options(self, name: str) -> dict:
        """What makes the operation run here, on tiny inputs."""
        return {"tuning": self.small[name]} if name in self.small else {}

    def plant(self, patch: pytest.MonkeyPatch, place: str, fault):
        """Put a fault at "file.function"; the right one, if it takes that, is its `right`."""
        file, name = place.split(".")
        module = self.module(file)
        if "right" in inspect.signature(fault).parameters:
            fault = functools.partial(fault, right=getattr(module, name))
        patch.setattr(module, name, fault)


class Pallas(Package):
    """Interpreted with DMAs done when they are waited for, or at once and with a look at races."""

    folder = "kernels_pallas"
    small = {"select_pages": pallas.SelectTuning(unit=4, ring=2, group=1, digit=2)}
    static = {"select_pages": "max_selected"}

    def __init__(self, name, mode):
        super().__init__(name)
        self.mode = mode

    def kernel(self, name, **options):
        """Traced anew, so that a planted fault is seen."""
        options = self.options(name) | options
        static = self.static.get(name, ())
        return ladder.interpreted(self.function(name), self.mode, static=static, **options)


class Triton(Package):
    """By Triton's interpreter, whose arithmetic in bfloat16 is wrong; without triton, skipped."""

    folder = "kernels_triton"
    small = {"select_pages": triton.SelectTuning(score=8, count=4, list=4, num_warps=4)}

    def module(self, name):
        pytest.importorskip("triton", reason="there is no triton for this machine")
        return super().module(name)

    def kernel(self, name, **options):
        return ladder.on_torch(self.function(name), **self.options(name) | options)


PALLAS, EAGER = Pallas("pallas", ladder.ON_WAIT), Pallas("pallas-eager", ladder.EAGER)
TRITON = Triton("triton")
BOTH = PALLAS, TRITON
