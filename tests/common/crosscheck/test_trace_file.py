"""Files of traces, whole and broken; what is refused; the page, the command line, the matrix."""

import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from common.crosscheck import compare, compare_page, matrix, trace_file
from common.crosscheck.trace_file import Trace, TraceWriter
from common.errors import UserError
from common.model import hf
from tests.common.made_up_traces import B, T, judged


def test_what_is_missing_is_said_and_what_has_another_shape_is_refused(write):
    def without(arrays):
        for name in [n for n in arrays if n.startswith(("decode", "replay", "forward/q"))]:
            del arrays[name]

    result, rows = judged(write, without)
    missing = "replay, decode, forward/q"
    assert result.verdict == f"SAME within the tolerances; not compared: {missing}"
    assert "forward/q" not in rows and not result.notes

    def partly(arrays):
        for kind in ("norm", "projection"):
            arrays[f"grad/layers.k_LDKH/{kind}"] = arrays[f"grad/layers.q_LDNH/{kind}"]

    assert judged(write, partly)[0].missing == ["grad/layers.k_LDKH"]

    def untrained(arrays):
        for name in [n for n in arrays if n.startswith(("grpo", "grad", "step"))]:
            del arrays[name]

    assert judged(write, untrained)[0].missing == ["grpo", "grad", "step"]

    def cut(arrays):
        arrays["forward/q"] = arrays["forward/q"][:1]

    with pytest.raises(UserError, match="forward/q has shape"):
        judged(write, cut)

    def no_tokens(arrays):
        del arrays["tokens/total_len"]

    with pytest.raises(UserError, match="has no tokens/total_len"):
        compare.compare(write("x", no_tokens), write("y", no_tokens))

    def words(arrays):
        arrays["score/logp"] = np.full((B, T), "x")

    with pytest.raises(UserError, match="score/logp holds no numbers"):
        judged(write, words)
    for config in ({}, None, {"mismatch": {"bin_tokens": 0}}, {"mismatch": {"bin_tokens": "5"}}):
        with pytest.raises(UserError, match="has no mismatch.bin_tokens"):
            judged(write, None, config=config)


@pytest.mark.parametrize("key, value, words", [
    ("model_checksum", "x", "other weights"), ("prompts_checksum", "x", "other prompts"),
    ("settings", {"seed": 1, "temperature": 1.0}, "the same seed"),
])  # fmt: skip
def test_traces_of_something_else_are_refused(write, key, value, words):
    with pytest.raises(UserError, match=words):
        compare.compare(write("a"), write("b", **{key: value}))


def test_broken_files_get_one_line(write, tmp_path):
    sound = write("a").path
    for name, content in (("empty", b""), ("text", b"hello"), ("cut", sound.read_bytes()[:-300])):
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        with pytest.raises(UserError, match="is no trace") as caught:
            Trace(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no such file"):
        Trace(tmp_path / "missing.npz")
    np.savez(tmp_path / "other.npz", meta=np.frombuffer(b'{"format": "x"}', np.uint8))
    with pytest.raises(UserError, match="expected format"):
        Trace(tmp_path / "other.npz")
    np.savez(tmp_path / "none.npz", x=np.zeros(3))
    with pytest.raises(UserError, match="is no trace"):
        Trace(tmp_path / "none.npz")
    for at in range(100, sound.stat().st_size - 1, 997):
        damaged = bytearray(sound.read_bytes())
        damaged[at] ^= 0xFF
        (tmp_path / "damaged.npz").write_bytes(damaged)
        try:
            compare.compare(Trace(tmp_path / "damaged.npz"), Trace(sound))
        except UserError as error:
            assert "\n" not in str(error)


def swapped(sound, path, name, data):
    """A copy of a trace in which one member holds `data`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out, zipfile.ZipFile(sound) as old:
        for member in old.namelist():
            out.writestr(member, data if member == name else old.read(member))
    return path


def header(shape, descr="'<f4'"):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize("data", [
    header("(1099511627776,)") + bytes(64),  # 4 TiB
    header("(2, -12)") + bytes(96), header("(True, 24)") + bytes(96), header("(2, 12)", "'|O'"),
    header("(" * 5000), header("(2, 12)") + bytes(95), header("(2, 12)") + bytes(97), b"",
])  # fmt: skip
def test_arrays_whose_header_lies_get_one_line(write, tmp_path, data):
    """2 x 12 numbers of 4 bytes are 96 bytes."""
    sound = write("a")
    bad = Trace(swapped(sound.path, tmp_path / "bad.npz", "score/logp.npy", data))
    for first, second in ((sound, bad), (bad, sound), (bad, bad)):
        with pytest.raises(UserError, match="bad.npz: is no trace, or damaged") as caught:
            compare.compare(first, second)
        assert "\n" not in str(caught.value)


def test_a_small_file_is_not_unpacked_before_its_shape_is_refused(write, tmp_path):
    """64 MiB of zeros in 65 kB: the refusal allocates less than 8 MiB."""
    sound = write("a")
    data = header(f"({1 << 24},)") + bytes(4 << 24)
    bomb = Trace(swapped(sound.path, tmp_path / "bomb.npz", "score/logp.npy", data))
    del data
    tracemalloc.start()
    with pytest.raises(UserError, match="score/logp has shape .16777216,."):
        compare.compare(sound, bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_meta_data_that_are_nested_too_deep_get_one_line(write, tmp_path):
    text = b'{"format": "sparrow-trace-1", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    data = header(f"({len(text)},)", "'|u1'") + text
    with pytest.raises(UserError, match="is no trace, or damaged"):
        Trace(swapped(write("a").path, tmp_path / "deep.npz", "meta.npy", data))


def test_seeded_damages_end_in_one_line_or_in_a_judgement(write, tmp_path):
    """Flipped bits, most of them in the directory at the end; runs of noise; cuts."""
    sound, path = write("a"), tmp_path / "damaged.npz"
    content, rng = sound.path.read_bytes(), np.random.default_rng(5)
    directory = content.index(b"PK\x01\x02")
    for i in range(60):
        damaged = bytearray(content)
        at = int(rng.integers(directory if i % 3 else 0, len(content)))
        if i % 5 == 0:
            damaged[at : at + 40] = rng.bytes(40)
        elif i % 11 == 0:
            del damaged[at : at + int(rng.integers(1, 500))]
        else:
            damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            compare.compare(Trace(path), sound)
        except UserError as error:
            assert "\n" not in str(error)


def test_a_trace_that_was_cut_short_leaves_no_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "a.npz") as file:
        file.put("x", np.zeros(3))
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_checksums_tell_names_shapes_and_values_apart():
    x = np.arange(6, dtype=np.float32)
    others = ([("b", x)], [("a", x.reshape(2, 3))], [("a", x + 1)], [("a", np.float64(x))])
    sums = {trace_file.checksum(pairs) for pairs in ([("a", x)], *others)}
    assert len(sums) == 5 and trace_file.checksum([("a", x.copy())]) in sums


def test_the_page_names_verdict_quantities_and_both_sides(write, tmp_path):
    a = write("a")
    b = write("b", lambda x: x["forward/v"].__iadd__(1), backend="torch", device="<gpu>")
    result = compare.compare(a, b)
    compare_page.write(result, a, b, tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    for words in ("DIFFERENT, first in forward/v", "torch float32 on &lt;gpu&gt;", "Noise floor",
                  "decode/pages", "grad/layers.q_LDNH", "<svg"):  # fmt: skip
        assert words in page, words
    assert "<script" not in page


def test_the_command_line_ends_with_the_verdict(write, sparrow, tmp_path):
    write("a"), write("b", lambda x: x["forward/v"].__iadd__(1)), write("c", model_checksum="x")
    same = sparrow("compare", "a.npz", "a.npz", "--out=p.html", cwd=tmp_path)
    assert same.returncode == 0 and "SAME" in same.stdout and (tmp_path / "p.html").is_file()
    other = sparrow("compare", "a.npz", "b.npz", cwd=tmp_path)
    assert other.returncode == 1 and "first in forward/v" in other.stdout.splitlines()[-1]
    refused = sparrow("compare", "a.npz", "c.npz", cwd=tmp_path)
    assert refused.returncode == 2 and "other weights" in refused.stderr


def test_the_matrix_marks_what_differs(write):
    def change(arrays):
        arrays["forward/q"][1, 0, 5, 0] += 1
        arrays["stream/greedy/tokens"][1, 2] += 1

    result, _ = judged(write, change)
    cells = {name: matrix.cell(result, key) for name, key in matrix.COLUMNS.items()}
    assert cells["activations"].endswith(" !") and cells["tokens"] == "75% same !"
    assert cells["LSE"] == "0e+00" and cells["gradients"] == "0e+00"
    assert matrix.cell(result, ("nothing/",)) == "-"


def test_the_matrix_ends_with_a_page_and_a_status(write, tmp_path, monkeypatch, capsys):
    def made_up(out, more):
        first = {("qwen3", *matrix.FIRST): write("a").path}
        return first | {("qwen3", backend, "float32"): second for backend in more}

    monkeypatch.setattr(matrix, "record_all", made_up)
    second = write("b").path
    assert matrix.main(tmp_path, ["vllm"]) == 0
    assert "| qwen3 | vllm float32 | 0e+00 |" in capsys.readouterr().out
    second = write("b", lambda x: x["forward/v"].__iadd__(1)).path
    assert matrix.main(tmp_path, ["vllm"]) == 1
    page = (tmp_path / "index.html").read_text()
    assert "Some pairs differ" in page and "qwen3-vllm-float32.html" in page


def test_the_matrix_takes_further_backends_over_the_tokens_of_the_first(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(matrix, "write_model", lambda *_: None)
    monkeypatch.setattr(matrix, "record", lambda *job: asked.append(job) or job[0] / job[1])
    plain = set(matrix.record_all(tmp_path))
    more = set(matrix.record_all(tmp_path, ["vllm"])) - plain
    assert more == {("qwen3", "vllm", "float32"), ("qwen3", "vllm", "bfloat16"),
                    ("llama", "vllm", "float32")}  # fmt: skip
    for model, backend, dtype, force in asked:
        first = (backend, dtype) == matrix.FIRST
        assert force == (None if first else model / "jax")


@pytest.mark.parametrize("name", matrix.MODELS)
def test_the_matrix_writes_models_that_can_be_read(tmp_path, name):
    matrix.write_model(tmp_path, matrix.MODELS[name])
    geometry, weights = hf.load(tmp_path)
    assert geometry.qk_norm == (name == "qwen3") and geometry.num_layers == 2
    q = dict(weights)["layers.q_LDNH"]
    assert q.std() == pytest.approx(1.2 / np.sqrt(96), rel=0.02)
    assert (tmp_path / "prompts.json").is_file()
