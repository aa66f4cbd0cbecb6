"""The two backends have the same files, with the same public names and positional parameters.

Read from the source, so that the test needs neither jax nor torch.
"""

import ast
import functools

from tests.conftest import ROOT

JAX_ONLY = {
    "bench_profile.py": "the goal for a profile is one for a CPU with XLA",
    "checkpoint.py": "the learner is Flax with every engine",
    "placement.py": "torch runs on one device",
    "sharded_ops.py": "torch runs on one device",
    "tpu_programs.py": "compiles for TPUs; Triton kernels are compiled by kernels_triton",
    "backend.py build": "builds the learner too, which is Flax with every engine",
    "backend.py check_page": "Triton kernels read pages of any size",
    "backend.py export_weights": "weights go from the Flax learner to the torch engine",
    "backend.py init_model": "only the package of the learner starts models from scratch",
    "backend.py new_entries": "only the package of the learner starts models from scratch",
    "decode.py prefill": "a function that XLA compiles; in torch a method does the work",
    "decode.py fork": "a function that XLA compiles; in torch a method does the work",
    "decode.py decode": "a function that XLA compiles; in torch a method does the work",
    "hf.py flat_weights": "a Flax state is a tree; torch has named_parameters",
    "hf.py to_state": "a Flax state is a tree; torch has Decoder.load",
    "learner.py Learner": "the learner is Flax with every engine",
    "learner.py Learner.load_state_dict": "the learner is Flax with every engine",
    "learner.py Learner.params": "the learner is Flax with every engine",
    "learner.py Learner.put": "the learner is Flax with every engine",
    "learner.py Learner.state_dict": "the learner is Flax with every engine",
    "learner.py Learner.update": "the learner is Flax with every engine",
    "model.py Layers": "nnx needs a module for nested parameters; torch has ParameterDict",
}
TORCH_ONLY = {
    "smollm2.py": "converts a model that transformers reads, which needs torch",
    "transformers_tracer.py": "transformers is written in torch",
    "vllm_tracer.py": "vLLM is written in torch",
    "backend.py build_engine": "the engine alone, for the Flax learner",
    "decode.py DecodeStep": "the buffers of a CUDA graph; XLA launches a whole chunk at once",
    "decode.py DecodeStep.load": "the buffers of a CUDA graph",
    "decode.py Programs.fuse": "XLA fuses by itself",
    "decode.py Shape": "what a CUDA graph depends on; jax.jit has static_argnames",
    "decode.py bucket": "the row numbers that have a CUDA graph",
    "decode.py run_again": "a step where there are no CUDA graphs",
    "engine.py Engine.load_weights": "copies, because torch weights are changed in place",
    "model.py Decoder.load": "torch weights are changed in place",
    "model.py Decoder.logits": "a product with float32 output needs its own call on a GPU",
    "sampling.py fused_sample": "calls a Triton kernel; XLA fuses `sample`",
    "scorer.py Scorer.load_weights": "copies, because torch weights are changed in place",
    "tracer.py Tracer.tensor": "serves PagedCache too; jax takes numpy arrays",
    "tracer.py chosen_and_entropy": "serves the tracers of transformers and vLLM too",
    "tracer.py describe": "serves the tracers of transformers and vLLM too",
    "tracer.py joined": "serves the tracers of transformers and vLLM too",
    "tracer.py new_weights": "the optimizer step of a trace; in jax the learner takes it",
    "tracer.py removing": "serves the tracers of transformers and vLLM too",
    "tracer.py stacked": "serves the tracers of transformers and vLLM too",
    "tracer.py top_tokens": "serves the tracers of transformers and vLLM too",
}
OTHER_PARAMETERS = {
    "backend.py compute_dtype": "jax knows the device",
    "hf.py load": "JAX gives geometry and weights, torch a decoder; each takes its own options",
    "hf.py save": "JAX takes geometry and weights, torch a decoder",
    "learner.py accumulate_gradient": "torch keeps gradients beside the weights",
    "learner.py make_optimizer": "torch optimizers hold the weights",
    "model.py Decoder.head": "jax casts weights in each pass, torch once",
}
OWN_BENCH = "bench.py"  # each measures what its device is for; only the file's name is shared


@functools.cache
def names(folder):
    """{"file.py" or "file.py name" or "file.py Class.method": positional parameters or None}."""
    found = {}
    for file in (ROOT / folder).glob("*.py"):
        found[file.name] = None
        nodes = [] if file.name == OWN_BENCH else ast.parse(file.read_text()).body
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                found |= {
                    f"{file.name} {node.name}.{each.name}": positional(each)
                    for each in node.body
                    if isinstance(each, ast.FunctionDef)
                }
                found[f"{file.name} {node.name}"] = None
            elif isinstance(node, ast.FunctionDef):
                found[f"{file.name} {node.name}"] = positional(node)
    is_public = lambda name: not any(p[:1] == "_" for p in name.split(" ")[-1].split("."))  # noqa: E731
    return {name: value for name, value in found.items() if " " not in name or is_public(name)}


def positional(function):
    return [a.arg for a in function.args.args]


def missing(mine, others, allowed):
    """Names of `mine` that neither `others` has nor the list, by name or by file."""
    only = names(mine).keys() - names(others).keys()
    return {name for name in only if not {name, name.split()[0]} & allowed.keys()}


def test_files_and_public_names_are_the_same_but_for_the_listed_ones():
    assert missing("sparrow_jax", "sparrow_torch", JAX_ONLY) == set()
    assert missing("sparrow_torch", "sparrow_jax", TORCH_ONLY) == set()


def test_every_listed_difference_is_one():
    in_jax, in_torch = names("sparrow_jax"), names("sparrow_torch")
    assert JAX_ONLY.keys() <= in_jax.keys() - in_torch.keys()
    assert TORCH_ONLY.keys() <= in_torch.keys() - in_jax.keys()


def test_positional_parameters_are_the_same_but_for_the_listed_functions():
    in_jax, in_torch = names("sparrow_jax"), names("sparrow_torch")
    shared = in_jax.keys() & in_torch.keys()
    assert {name for name in shared if in_jax[name] != in_torch[name]} == OTHER_PARAMETERS.keys()


def test_the_verbs_of_a_device_are_in_both():
    for folder in ("sparrow_jax", "sparrow_torch"):
        for verb in ("prefill", "fork", "decode", "close"):
            assert f"decode.py Programs.{verb}" in names(folder)
