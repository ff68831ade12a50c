"""Properties of the hardware: each number stands here once, and kernels get the same ones as constants (`EMITTED`)."""

WORD_BITS = 32  # bits of a word, in which masks are packed
WARP = 32  # threads that execute together
WARPGROUP = 4 * WARP  # threads that issue one wgmma
ROWS_OF_WARPGROUP = 64  # the M of a wgmma
ROWS_OF_WARP = ROWS_OF_WARPGROUP * WARP // WARPGROUP  # rows of a wgmma that one warp has, and the M of an mma.sync
STEP = 16  # the K of a wgmma and of an mma.sync on elements of 16 bits
CODE_BYTES, HALF_BYTES, FLOAT_BYTES = 1, 2, 4  # bytes of an e4m3 code, of an element of 16 bits, and of a float32
# The widest access of one thread, in bytes; TMA wants addresses and strides to be multiples of it.
ALIGNMENT = 16
# TMA and wgmma see a tile as panels: rows of this many bytes, swizzled in atoms of eight rows.
SWIZZLE_BYTES = 128
SMEM_ALIGNMENT = 8 * SWIZZLE_BYTES  # bytes that a swizzled tile's address in shared memory is a multiple of
PANEL = SWIZZLE_BYTES // HALF_BYTES  # columns of a panel of 16-bit elements
REGISTERS_OF_SM = 1 << 16  # 32-bit registers of a multiprocessor
MAX_CLUSTER = 8  # thread blocks of a cluster on every GPU that has clusters
SMS_OF_GPC = 16  # multiprocessors, at least, of a part of the GPU within which a cluster runs
LINE_BYTES = 128  # of the L2 cache
SECTOR_BYTES = 32  # what L2 reads and writes of a line at a time
# The part of Hopper's 50 MB of L2 that heads which are computed together may fill with what they share.
L2_BYTES = 32 << 20

# The numbers that every kernel gets, as `constexpr int` of the same names.
EMITTED = {
    "WORD_BITS": WORD_BITS,
    "WARP": WARP,
    "WARPGROUP": WARPGROUP,
    "ROWS_OF_WARPGROUP": ROWS_OF_WARPGROUP,
    "ROWS_OF_WARP": ROWS_OF_WARP,
    "STEP": STEP,
    "ALIGNMENT": ALIGNMENT,
    "SWIZZLE_BYTES": SWIZZLE_BYTES,
    "SMEM_ALIGNMENT": SMEM_ALIGNMENT,
    "PANEL": PANEL,
    "LINE_BYTES": LINE_BYTES,
    "REGISTERS_OF_SM": REGISTERS_OF_SM,
}

# Kilobytes of shared memory that a thread block may use (CUDA C++ programming guide, "Technical Specifications").
_SMEM_KILOBYTES = {
    "70": 96,
    "75": 64,
    "80": 163,
    "86": 99,
    "87": 163,
    "89": 99,
    "90": 227,
    "100": 227,
    "103": 227,
    "110": 227,
    "120": 99,
    "121": 99,
}
KNOWN_ARCHITECTURES = tuple(f"sm_{number}" for number in _SMEM_KILOBYTES)  # the oldest first
SMALLEST_SMEM = min(_SMEM_KILOBYTES.values()) * 1024
SMEM_BYTES = _SMEM_KILOBYTES["90"] * 1024  # bytes that a thread block may use on Hopper
# Multiprocessors of the card of an architecture that most people have.
_NUM_SMS = {"75": 40, "80": 108, "86": 84, "89": 128, "90": 132, "100": 148}


def capability_of(arch: str) -> tuple[int, int]:
    """The compute capability of an architecture's name: (9, 0) for ``"sm_90a"``."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def smem_limit(arch: str) -> int:
    """Bytes of shared memory that a thread block may use on ``"sm_90a"``, say.

    A GPU that is not listed has as much as the newest one of its major version, or as the least of those since Ampere.
    """
    own, (major, _) = arch.removeprefix("sm_").rstrip("af"), capability_of(arch)
    kin = [number for number in _SMEM_KILOBYTES if capability_of(number)[0] == major] or ["86"]
    return _SMEM_KILOBYTES.get(own, _SMEM_KILOBYTES[kin[-1]]) * 1024


def num_sms(arch: str) -> int:
    """Multiprocessors of the usual card of ``"sm_90a"``, say; of an architecture without one as many as of an H100."""
    return _NUM_SMS.get(arch.removeprefix("sm_").rstrip("af"), _NUM_SMS["90"])


def whole_steps(columns: int) -> int:
    """`columns` of 16-bit elements, rounded up to a multiple of `STEP`."""
    return -(-columns // STEP) * STEP


def whole_rows(size: int) -> int:
    """`size` bytes, rounded up to a multiple of `SWIZZLE_BYTES`."""
    return -(-size // SWIZZLE_BYTES) * SWIZZLE_BYTES
