"""Worked examples, installed as ``cuflash.examples``."""
