"""Parquet files of odd types, and damaged ones, seeded: one line, or the prompts that were written.

Pages carry checksums here, so that a flipped bit in the data is seen, too.
"""

import datetime
import decimal
import random

import pytest

from common.config import TaskConfig
from common.errors import UserError
from common.tasks import registry
from tests.common.task_files import row, write_tokenizer

ROWS = [row(f"{i} + {i}?", str(2 * i)) for i in range(6)]
COLUMNS = ("data_source", "prompt", "reward_model")
DAY = datetime.datetime(2026, 1, 1)
ODD = (
    None, True, -1, 2**63 - 1, 1e308, float("nan"), "", "9" * 5000, b"\xff\x00", [], [[]], {},
    {"a": 1}, [None], [{"role": None, "content": "x"}], DAY, DAY.date(), DAY.time(),
    datetime.timedelta(days=1), decimal.Decimal("1.5"), [{"role": "user", "content": 5}],
    [["role", "user"]], '[{"role": "user"}]', "reasoning_gym:", "x/y", "pointer_chase",
    {"ground_truth": {"a": [1, {"b": 2}]}}, {"ground_truth": b"7"}, {"ground_truth": DAY},
    {"ground_truth": float("nan")}, {"ground_truth": decimal.Decimal("NaN")},
    {"ground_truth": [["answer"]]}, {"ground_truth": "\0"}, {"ground_truth": {"chain": [1.0]}},
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parquet")
    write_tokenizer(folder / "t")
    return folder


def write(path, table, rng):
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        table, path, compression=rng.choice(("none", "snappy", "zstd", "gzip")),
        use_dictionary=rng.random() < 0.5, version=rng.choice(("1.0", "2.6")),
        data_page_version=rng.choice(("1.0", "2.0")), store_schema=rng.random() < 0.7,
        write_page_checksum=True,
    )  # fmt: skip


def prompts(path):
    """(tokens, answer) of each row; None after one line for the user."""
    try:
        task = registry.build_task(TaskConfig(name=str(path), tokenizer=str(path.parent / "t")), "")
    except UserError as error:
        assert "\n" not in str(error)
        assert str(path) in str(error) and len(str(error)) < 600
        return None
    return [(p.tokens.tolist(), p.answer) for p in task.prompts]


def odd_table(rng):
    """Columns of other types or encodings, one of them twice or not at all."""
    import pyarrow as pa

    columns = {name: [r[name] for r in ROWS] for name in COLUMNS}
    for name in rng.sample(COLUMNS, rng.randint(1, 2)):
        columns[name] = [rng.choice(ODD)] * 6
    arrays = [pa.array(values) for values in columns.values()]
    names = list(columns)
    if rng.random() < 0.2:
        at = rng.randrange(3)
        arrays[at] = arrays[at].dictionary_encode() if rng.random() < 0.5 else arrays[at][:0]
        arrays = [a if len(a) else pa.nulls(6) for a in arrays]
    if rng.random() < 0.1:
        arrays.append(arrays[0])
        names.append(rng.choice(names))
    return pa.Table.from_arrays(arrays, names)


def damaged(data, rng):
    """One seeded damage, most of them in the footer, where types, sizes and counts stand."""
    length = int.from_bytes(data[-8:-4], "little")
    start, kind = len(data) - 8 - length, rng.randrange(6)
    at = rng.randrange(start if kind else 0, len(data) - 8)
    if kind < 2:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return data[: rng.randrange(len(data))]
    if kind == 3:
        return data[:at] + rng.randbytes(4) + data[at + 4 :]
    if kind == 4:  # a huge number where the footer had a small one
        longer = (length + 4).to_bytes(4, "little")
        return data[:at] + b"\xfe\xff\xff\xff\x7f" + data[at + 1 : -8] + longer + data[-4:]
    return data[:-8] + rng.choice((b"\xff" * 4, bytes(4), rng.randbytes(4))) + data[-4:]


def test_columns_of_odd_types_end_in_one_line(folder):
    pa, rng, refused = pytest.importorskip("pyarrow"), random.Random(1), 0
    for _ in range(120):
        try:
            write(folder / "d.parquet", odd_table(rng), rng)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue  # parquet has no such type
        refused += prompts(folder / "d.parquet") is None
    assert refused > 80


def test_a_damaged_file_ends_in_one_line_or_gives_what_was_written(folder):
    pa, rng, refused = pytest.importorskip("pyarrow"), random.Random(2), 0
    path = folder / "d.parquet"
    for _ in range(120):
        write(path, pa.Table.from_pylist(ROWS), rng)
        whole = prompts(path)
        assert [answer["number"] for _, answer in whole] == ["0", "2", "4", "6", "8", "10"]
        path.write_bytes(damaged(path.read_bytes(), rng))
        found = prompts(path)
        refused += found is None
        assert found in (None, whole)
    assert 60 < refused < 120
