"""Draws a load run: how TTFT and ITL are distributed, and tokens a second over its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.bench.load_generator import Run
from octavo.bench.reports import itls, num_tokens, ttft
from octavo.errors import ConfigError

_BINS = 60


def check_can_plot(path: Path) -> None:
    """ConfigError where `plot` could not write there; better now than after the run."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"--plot draws with matplotlib, which is not installed: {error}") from error
    matplotlib.use("agg")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".") not in kinds:
        raise ConfigError(f"--plot is {str(path)!r}; its ending must be one of {', '.join(kinds)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot is {str(path)!r}, but there is no directory {str(path.parent)!r}")


def plot(run: Run, path: Path, title: str) -> None:
    """Write the chart, in the format that the path's ending names."""
    import matplotlib.pyplot as plt

    whole = [record for record in run.records if record.error is None]
    figure, (first, between, over_time) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    figure.suptitle(title)
    _distribution(first, [value for record in whole if (value := ttft(record)) is not None], "TTFT")
    _distribution(between, [gap for record in whole for gap in itls(record)], "ITL")
    times, weights = [], []
    for record in whole:
        share = num_tokens(record) / max(len(record.arrivals), 1)
        times += [arrival - run.started for arrival in record.arrivals]
        weights += [share] * len(record.arrivals)
    seconds = max(run.ended - run.started, 1e-9)
    counts, edges = _histogram(times, weights, seconds)
    over_time.stairs([count * _BINS / seconds for count in counts], edges, fill=True)
    over_time.set(xlabel="seconds", ylabel="output tokens/s", title="throughput")
    figure.savefig(path)
    plt.close(figure)


def _distribution(axes: Any, seconds: list[float], name: str) -> None:
    if seconds:
        axes.ecdf([1e3 * value for value in seconds])
    axes.set(xlabel="ms", ylabel="share of samples", title=name, ylim=(0, 1))
    axes.grid(alpha=0.3)


def _histogram(times: list[float], weights: list[float], seconds: float) -> tuple[list[float], list[float]]:
    counts = [0.0] * _BINS
    for moment, weight in zip(times, weights, strict=True):
        counts[min(int(moment / seconds * _BINS), _BINS - 1)] += weight
    return counts, [seconds * edge / _BINS for edge in range(_BINS + 1)]
