"""What a container may use: cgroup v1 and v2, as their files say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.platforms import cpu

GIB = 1 << 30
ALLOWED = len(os.sched_getaffinity(0))


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize(
    ("cpu_max", "threads"),
    [
        ("max 100000\n", 64),
        ("800000 100000\n", 8),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("1000 100000\n", 1),
        ("9900000 100000\n", 64),
        ("garbage\n", 64),
        ("", 64),
    ],
)
def test_quota_v2(tmp_path: Path, cpu_max: str, threads: int) -> None:
    assert cpu.num_threads(write(tmp_path, {"cpu.max": cpu_max})) == threads


@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize(
    ("quota", "period", "threads"),
    [("-1\n", "100000\n", 64), ("400000\n", "100000\n", 4), ("10000\n", "100000\n", 1), ("x", "1", 64)],
)
def test_quota_v1(tmp_path: Path, quota: str, period: str, threads: int) -> None:
    files = {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": period}
    assert cpu.num_threads(write(tmp_path, files)) == threads


@pytest.mark.usefixtures("many_cpus")
def test_no_cgroup_is_no_quota(tmp_path: Path) -> None:
    assert cpu.num_threads(tmp_path) == 64
    v1_without_period = write(tmp_path, {"cpu/cpu.cfs_quota_us": "400000"})
    assert cpu.num_threads(v1_without_period) == 64


def test_the_affinity_mask_counts(tmp_path: Path) -> None:
    assert cpu.num_threads(tmp_path) == ALLOWED


@pytest.fixture
def free() -> int:
    """Bytes the machine itself has free; far more than the limits below."""
    free = cpu.available_memory(Path("/nowhere"))
    assert free > GIB // 2
    return free


@pytest.mark.usefixtures("free")
def test_memory_v2(tmp_path: Path) -> None:
    files = {"memory.max": f"{GIB // 2}\n", "memory.current": f"{GIB // 8}\n"}
    assert cpu.available_memory(write(tmp_path, files)) == GIB // 2 - GIB // 8


@pytest.mark.usefixtures("free")
def test_memory_v1(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": f"{GIB // 2}\n", "memory/memory.usage_in_bytes": "4096\n"}
    assert cpu.available_memory(write(tmp_path, files)) == GIB // 2 - 4096


@pytest.mark.usefixtures("free")
def test_cached_files_make_room(tmp_path: Path) -> None:
    """A model file just read fills the page cache, which the kernel counts as used by the cgroup."""
    stat = "anon 1000\nfile 700\ninactive_file 400\nactive_file 300\nshmem 0\n"
    v2 = {"memory.max": "10000000", "memory.current": "9000000", "memory.stat": stat}
    assert cpu.available_memory(write(tmp_path / "v2", v2)) == 1_000_000 + 700
    stat = "cache 700\ninactive_file 1\nactive_file 2\ntotal_inactive_file 400\ntotal_active_file 300\n"
    v1 = {
        "memory/memory.limit_in_bytes": "10000000",
        "memory/memory.usage_in_bytes": "9000000",
        "memory/memory.stat": stat,
    }
    assert cpu.available_memory(write(tmp_path / "v1", v1)) == 1_000_000 + 700


def test_without_a_limit_the_machine_counts(tmp_path: Path, free: int) -> None:
    unlimited = {"memory.max": "max\n", "memory.current": "4096\n"}
    v1_unlimited = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "4096\n",
    }
    for i, files in enumerate((unlimited, v1_unlimited, {"memory.max": "garbage"})):
        found = cpu.available_memory(write(tmp_path / str(i), files))
        assert found == pytest.approx(free, rel=0.5)


def test_over_the_limit_is_nothing_not_less(tmp_path: Path) -> None:
    files = {"memory.max": "1000\n", "memory.current": "5000\n"}
    assert cpu.available_memory(write(tmp_path, files)) == 0


def test_the_name() -> None:
    assert cpu.name()
