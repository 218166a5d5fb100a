"""What the CPU offers: threads, memory, its name.

Rule: the only module that asks the operating system about the CPU. Inside a container the cgroup's
quota counts, not what the host has.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def num_threads(cgroup: Path = _CGROUP) -> int:
    """Threads that can run at once: the affinity mask, cut to the cgroup's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, round(quota)))


def _quota(cgroup: Path) -> float | None:
    """CPUs' worth of time this cgroup may use; None without a limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()  # cgroup v2
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())  # cgroup v1
        return None if limit_us <= 0 else limit_us / int((cgroup / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that can be allocated without swapping, cut to the cgroup's limit."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: all of physical memory is the best guess
    room = _room(cgroup, "memory.max", "memory.current", "")  # cgroup v2
    if room is None:
        room = _room(cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")  # v1
    return max(0, available if room is None else min(available, room))


def _room(cgroup: Path, limit: str, usage: str, prefix: str) -> int | None:
    """Bytes this cgroup may still allocate; None without a limit. Cached files count as used there, but
    make room when memory runs short."""
    try:
        room = int((cgroup / limit).read_text()) - int((cgroup / usage).read_text())
    except (OSError, ValueError):  # no such version, or "max"
        return None
    try:
        counters = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return room + sum(int(counters.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    except (OSError, ValueError):
        return room


def architecture() -> str:
    """The instruction set that this process is of, as `uname -m` spells it."""
    return platform.machine()


def name() -> str:
    """The processor's name, as it calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
