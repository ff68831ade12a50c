"""The command line: ``python -m cuflash``."""
