"""Names of hosts tell which processes can share memory."""

from __future__ import annotations

import platform
from pathlib import Path


def host_name() -> str:
    """Return a name that all processes of one host have in common, and no other host has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"
