"""A torch decoder's weights as a Hugging Face directory, shared with the JAX decoder."""

import numpy as np
import pytest
import torch

from common.model.geometry import Geometry
from sparrow_jax import hf as jax_hf
from sparrow_jax.toy.random_init import random_decoder
from sparrow_torch import hf
from tests.torch.test_engine import LLAMA, QWEN


@pytest.mark.parametrize("model", [QWEN, LLAMA], ids=["qwen3", "llama"])
def test_both_backends_read_and_write_the_same_files(model, tmp_path):
    params = random_decoder(model)[1]
    jax_hf.save(tmp_path / "a", Geometry.from_config(model), params)
    model = hf.load(tmp_path / "a")
    want = jax_hf.flat_weights(params)
    assert dict(model.named_parameters()).keys() == want.keys()
    for name, x in model.named_parameters():
        np.testing.assert_array_equal(x.detach().numpy(), want[name], name)
    hf.save(tmp_path / "b", model)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_bfloat16_weights_come_back_as_they_are(tmp_path):
    params = random_decoder(QWEN)[1]
    jax_hf.save(tmp_path / "a", Geometry.from_config(QWEN), params)
    model = hf.load(tmp_path / "a", dtype=torch.bfloat16)
    hf.save(tmp_path / "b", model)
    again = hf.load(tmp_path / "b", dtype=torch.bfloat16)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b)
    exact = hf.load(tmp_path / "a")
    assert not torch.equal(exact.embed_VD, model.embed_VD.float())
