"""What this machine can do at most: multiply-adds and bytes read a second, by loops that do nothing else.

ceilings.cpp is compiled for the CPU at hand when it is first asked for. Run as a program, this prints the
ceilings; its last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from octavo.config.resolve import resolve
from octavo.platforms import cpu

SOURCE = Path(__file__).with_name("ceilings.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread")
LOOPS = ("fma_f32", "madd_8", "dot_8", "madd_16", "dot_16")  # kLoops
LOOP_SECONDS = 0.1
DRAM_BYTES = 512 << 20  # far more than any cache, all threads together
WINDOWS, WINDOW_SECONDS = 40, 0.02


@dataclass(frozen=True)
class Ceilings:
    """Multiply-adds in 10^9 a second, reads in 10^9 bytes a second; 0 where this CPU has no such thing."""

    fma_f32: float
    madd_8: float  # maddubs and an addition
    dot_8: float  # VNNI dpbusd
    madd_16: float  # pmaddwd and an addition
    dot_16: float  # VNNI dpwssd
    dram: float
    l3: float

    def macs(self, activation_bits: int) -> float:
        """Of integers of 8 or 16 bits, or of f32 (32), with the CPU's best instruction for it."""
        return {8: max(self.madd_8, self.dot_8), 16: max(self.madd_16, self.dot_16), 32: self.fma_f32}[
            activation_bits
        ]

    def or_higher(self, other: Ceilings) -> Ceilings:
        """The higher of two measurements, each: others on the same machine come and go."""
        pairs = zip(asdict(self).items(), asdict(other).values(), strict=True)
        return Ceilings(**{name: max(mine, theirs) for (name, mine), theirs in pairs})

    def table(self) -> Table:
        """For people."""
        table = Table(*asdict(self), title="ceilings: 10^9 multiply-adds, and 10^9 bytes, a second")
        table.add_row(*(f"{value:.1f}" if value else "-" for value in asdict(self).values()))
        return table

    def rounded(self) -> dict[str, float]:
        """For JSON."""
        return {name: round(value, 1) for name, value in asdict(self).items()}


def measure(threads: int) -> Ceilings:
    """All of them, in some 3 seconds."""
    macs = {
        name: _library().ceiling_macs(kind, threads, LOOP_SECONDS) / 1e9 for kind, name in enumerate(LOOPS)
    }
    return Ceilings(**macs, dram=dram(threads), l3=l3(threads))


def dram(threads: int, windows: int = WINDOWS) -> float:
    """10^9 bytes a second, read from memory."""
    return _reads(threads, DRAM_BYTES // threads, windows)


def l3(threads: int) -> float:
    """10^9 bytes a second, read from half of the last cache; 0 if Linux tells no size, or if the cores' own
    caches would hold that."""
    sizes = [Path(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size") for level in (2, 3)]
    if not all(path.exists() for path in sizes):
        return 0.0
    own, last = (int(path.read_text().strip().removesuffix("K")) << 10 for path in sizes)
    each = last // (2 * threads)
    return _reads(threads, each) if each > 2 * own else 0.0


def _reads(threads: int, nbytes: int, windows: int = WINDOWS) -> float:
    return float(_library().ceiling_reads(threads, nbytes, windows, WINDOW_SECONDS)) / 1e9


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = os.environ.get("CXX", "g++")
    folder = resolve({}).config.cache_path / "benchmarks"
    key = hashlib.sha256(SOURCE.read_bytes() + f"{compiler} {FLAGS} {cpu.name()}".encode()).hexdigest()
    path = folder / f"ceilings-{key[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        try:
            subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(fresh)], check=True)
        except (OSError, subprocess.CalledProcessError) as why:
            sys.exit(
                f"ceilings.cpp could not be compiled with {compiler}: {why}. Set CXX to a C++17 compiler"
            )
        fresh.rename(path)
    library = ctypes.CDLL(str(path))
    library.ceiling_macs.restype = library.ceiling_reads.restype = ctypes.c_double
    library.ceiling_macs.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double]
    library.ceiling_reads.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_double]
    return library


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=cpu.num_threads())
    args = parser.parse_args()
    found = measure(args.threads)
    Console(stderr=True).print(found.table())
    result = {"benchmark": "ceilings", "cpu": cpu.name(), "threads": args.threads, **found.rounded()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
