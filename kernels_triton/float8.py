"""float8 e4m3 (sign, 4 bits of exponent with bias 7, 3 of fraction; no infinity) by bit operations.

Not every architecture has conversions, and Triton's interpreter does not round. Bytes are uint8.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode(x) -> tl.tensor:
    """Bytes of the nearest float8, ties to even; numbers past 448 become 448, NaN stays NaN."""
    x = x.to(tl.float32)
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (127 - 7) * 8
    # Below 2^-6 float8 counts in steps of 2^-9; adding 1.5 * 2^23 rounds to whole steps.
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 127)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 128)).to(tl.uint8)


@triton.jit
def decode(byte) -> tl.tensor:
    """The numbers as float16, which holds them exactly (the bytes of NaN give 480).

    Exponent and fraction, as the lowest of float16's exponent and the highest of its fraction, are
    the number / 256, subnormal numbers too.
    """
    bits = byte.to(tl.uint16)
    bits = ((bits & 128) << 8) | ((bits & 127) << 7)
    return bits.to(tl.float16, bitcast=True) * 256
