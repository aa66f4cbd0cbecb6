"""Both kernel packages behind one interface: the same test runs with PALLAS, EAGER and TRITON.

Operations take and give arrays as the checks of ladder.py do. Tunings are so small that the tiny
inputs of the tests go through every loop and use every buffer again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kernels_pallas import tuning as pallas
from kernels_triton import tuning as triton
from tests.kernels import ladder


class Package:
    """What the tests need of a kernel package; subclasses hold what differs between the two."""

    folder: str
    small: dict

    def __init__(self, name):
        self.__name__ = name  # pytest names the parameter by it

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.folder}.{name}")

    def function(self, name: str):
        """The operation of that name, which takes jax arrays or tensors."""
        home = "token_logprob" if name == "acceptance_overlap" else name
        return getattr(self.module(home), name)

    def options(self, name: str) -> dict:
        """Options with which the operation uses every loop and buffer on tiny inputs."""
        return {"tuning": self.small[name]} if name in self.small else {}

    def plant(self, patch: pytest.MonkeyPatch, place: str, fault):
        """Replace "file.function" by a fault, which may take the original as argument `right`."""
        file, name = place.split(".")
        module = self.module(file)
        if "right" in inspect.signature(fault).parameters:
            fault = functools.partial(fault, right=getattr(module, name))
        patch.setattr(module, name, fault)


class Pallas(Package):
    """Interpreted; a DMA runs when it is waited for, or immediately with detection of races."""

    folder = "kernels_pallas"
    small = {
        "select_pages": pallas.SelectTuning(unit=4, ring=2, group=1, digit=2),
        "sparse_decode": pallas.DecodeTuning(pages_per_block=2, num_buffers=4),
        "flash_prefill": pallas.PrefillTuning(queries=16, keys=32),
        "token_logprob": pallas.HeadTuning(tokens=32, vocabulary=32),
        "acceptance_overlap": pallas.HeadTuning(tokens=32, vocabulary=32),
    }
    static = {"select_pages": "max_selected", "flash_prefill": ("page", "chunk")}

    def __init__(self, name, mode):
        super().__init__(name)
        self.mode = mode

    def kernel(self, name, **options):
        """The operation on numpy arrays, traced again so that a planted fault takes effect."""
        options = self.options(name) | options
        static = self.static.get(name, ())
        return ladder.interpreted(self.function(name), self.mode, static=static, **options)

    def vjp(self, name, args, cotangents, **options):
        """(outputs, gradients of sum(outputs . cotangents) in each of args)."""
        options = {"interpret": self.mode, **self.options(name), **options}

        @functools.partial(jax.jit, compiler_options=ladder.QUICK)
        def run(cotangents, *args):
            out, pull = jax.vjp(functools.partial(self.function(name), **options), *args)
            return out, pull(cotangents)

        got = jax.block_until_ready(run(cotangents, *args))
        ladder.assert_no_race()
        return got

    def array(self, x, dtype=None):
        return jnp.asarray(x, dtype)

    def wide(self, x):
        return np.asarray(x, np.float32)


class Triton(Package):
    """Run by Triton's interpreter (which computes wrongly in bfloat16); skipped without triton."""

    folder = "kernels_triton"
    small = {
        "select_pages": triton.SelectTuning(score=8, count=4, list=4, num_warps=4),
        "sparse_decode": triton.DecodeTuning(16, splits=2, least=1, num_warps=4, num_stages=2),
        "flash_prefill": triton.PrefillTuning(*[triton.PrefillBlocks(16, 32, 1, 1)] * 4),
        "token_logprob": triton.HeadTuning(32, 16, 16, parts=2, num_warps=1, num_stages=1),
        "acceptance_overlap": triton.HeadTuning(32, 16, 16, parts=2, num_warps=1, num_stages=1),
    }

    def module(self, name):
        pytest.importorskip("triton", reason="there is no triton for this machine")
        return super().module(name)

    def kernel(self, name, **options):
        return ladder.on_torch(self.function(name), **self.options(name) | options)

    def vjp(self, name, args, cotangents, **options):
        options = {key: ladder.tensor(x) for key, x in (self.options(name) | options).items()}
        args = [self.array(x).detach().requires_grad_() for x in args]
        out = self.function(name)(*args, **options)
        torch.autograd.backward(out, jax.tree.map(ladder.tensor, cotangents))
        return jax.tree.map(torch.Tensor.detach, out), [x.grad for x in args]

    def array(self, x, dtype=None):
        x = ladder.tensor(x)
        return x.to(getattr(torch, dtype)) if dtype else x

    def wide(self, x):
        return torch.as_tensor(x).float().numpy()


PALLAS, EAGER = Pallas("pallas", ladder.ON_WAIT), Pallas("pallas-eager", ladder.EAGER)
TRITON = Triton("triton")
BOTH = PALLAS, TRITON
