"""cuflash inside further autodiff libraries: files to copy, which a wheel does not carry."""
