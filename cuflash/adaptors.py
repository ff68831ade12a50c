"""The earlier name of `cuflash.conversions`, which stays; adapters of autodiff libraries are in `cuflash.adapters`."""

from cuflash.conversions import from_base2_lse, from_csr, to_base2_lse

__all__ = ["from_base2_lse", "from_csr", "to_base2_lse"]
