"""cuflash inside further autodiff libraries, by its adapters in cuflash.adapters."""
