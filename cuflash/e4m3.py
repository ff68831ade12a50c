"""The 8-bit floating-point format e4m3 as ml_dtypes' float8_e4m3fn has it: sign, 4 bits of exponent, 3 of mantissa.

The bias of the exponent is 7. There is no inf; 0x7f and 0xff are NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

NAME = "float8_e4m3fn"
LARGEST = 448.0
_MANTISSA_BITS, _BIAS = 3, 7
_LEAST_NORMAL = 2.0 ** (1 - _BIAS)
_NAN = 0x7F
_SIGN = 0x80


def _values() -> Array:
    codes = np.arange(256)
    exponent, mantissa = codes >> _MANTISSA_BITS & 0xF, codes & 0x7
    # A subnormal number has the exponent of the least normal one, and no leading 1.
    fraction = (mantissa + np.where(exponent > 0, 8, 0)) / 8
    size = np.ldexp(fraction, np.maximum(exponent, 1) - _BIAS)
    size[codes & _NAN == _NAN] = np.nan
    return np.where(codes & _SIGN, -size, size).astype(np.float32)


VALUES = _values()  # the number of every code, float32
VALUES.setflags(write=False)


def decode(codes: Array) -> Array:
    """The numbers of uint8 codes, float32."""
    return VALUES[codes]


def encode(x: Array) -> Array:
    """The codes of float32 or float64 numbers, rounded to nearest even; 448 is the largest, and NaN stays NaN."""
    mantissa_bits = np.finfo(x.dtype).nmant
    unsigned = np.dtype(f"u{x.dtype.itemsize}").type
    with np.errstate(invalid="ignore"):
        size = np.minimum(np.abs(x), x.dtype.type(LARGEST))
        bits = size.view(unsigned)
        shift = unsigned(mantissa_bits - _MANTISSA_BITS)
        half = unsigned(1) << (shift - unsigned(1))
        rounded = (bits + (half - unsigned(1)) + (bits >> shift & unsigned(1))) >> shift
        rebias = unsigned((np.finfo(x.dtype).maxexp - 1 - _BIAS) << _MANTISSA_BITS)
        # Subnormal codes count units of the least one, and so does that of the least normal number.
        units = np.rint(size * x.dtype.type(2**_MANTISSA_BITS / _LEAST_NORMAL))
        codes = np.where(size < _LEAST_NORMAL, units, rounded - rebias)
        codes = np.where(np.isnan(x), _NAN, codes).astype(np.uint8)
    codes |= np.signbit(x).astype(np.uint8) << np.uint8(7)
    return codes
