"""The table of chips, and the measurement of this machine."""

import pytest

from common.cost import chips
from common.errors import UserError


def test_chips_are_complete_and_sane():
    for name, chip in chips.CHIPS.items():
        assert chip.name == name and len(chip.source) > 10
        assert 1e11 < chip.bytes_per_second < 1e13 and 1e10 < chip.memory_bytes < 1e12
        assert 100 < chip.intensity < 600  # FLOP a byte
    four = chips.CHIPS["h200"].times(4)
    assert four.memory_bytes == 4 * 141e9 and four.intensity == chips.CHIPS["h200"].intensity
    assert four.describe().startswith("4 x h200: 564 GB at 19200 GB/s")
    with pytest.raises(UserError, match="expected one of a100, h100"):
        chips.find("h300")


def test_this_machine_is_measured(monkeypatch):
    """Two clock readings a second apart around each of four runs: 2 x bytes, 2 x width^3 in it."""
    monkeypatch.setattr(chips.time, "perf_counter", iter(map(float, range(16))).__next__)
    chip = chips.measure(copy_bytes=4096, width=10)
    assert (chip.bytes_per_second, chip.flops_per_second) == (8192, 2000)
    assert chip.memory_bytes > 2**28
