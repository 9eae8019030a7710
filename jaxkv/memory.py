"""How much memory a cache could take."""

import os
from pathlib import Path
from typing import Any


def free_memory(device: Any) -> int:
    """Bytes that can still be allocated on a JAX device; on a CPU, of the machine's main memory."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return max(0, stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return free_main_memory()


def free_main_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of main memory that a program can still get; all of it if the system does not say."""
    try:
        (line,) = [x for x in meminfo.read_text().splitlines() if x.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
