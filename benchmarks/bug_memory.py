"""The most memory a process, or a GPU, has held since it was last asked to forget.

Knows counters of the system and of torch; knows nothing of what is measured.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: str) -> str:
    """Forget the peak so far. Returns since when it counts, in words."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return "behind loading and warming up, on the GPU"
    try:
        RESET.write_text("5")
    except OSError:
        return "the start of the process"
    return "behind loading and warming up"


def peak_bytes(device: str) -> int:
    """Bytes at the peak: allocated on the GPU, or resident."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    if STATUS.exists():
        for line in STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
