"""Conversion from and to float8 e4m3 by bit operations, on bytes (uint8).

e4m3 has a sign, 4 bits of exponent with bias 7 and 3 bits of fraction, and no infinity. Some
architectures have no instruction for it, and Triton's interpreter does not round.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode(x) -> tl.tensor:
    """The byte of the nearest float8, ties to even; beyond 448 it is 448, and NaN stays NaN."""
    x = x.to(tl.float32)
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (127 - 7) * 8
    # Below 2^-6 float8 has steps of 2^-9; adding 1.5 * 2^23 rounds to whole steps.
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 127)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 128)).to(tl.uint8)


@triton.jit
def decode(byte) -> tl.tensor:
    """The number as float16, which holds it exactly (the byte of NaN gives 480).

    The 4 bits of exponent and 3 of fraction, put into the low bits of float16's exponent and the
    high bits of its fraction, are the number / 256; subnormal numbers included.
    """
    bits = byte.to(tl.uint16)
    bits = ((bits & 128) << 8) | ((bits & 127) << 7)
    return bits.to(tl.float16, bitcast=True) * 256
