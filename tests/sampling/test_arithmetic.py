"""exp and log against numpy's, to a few units in the last place."""

from __future__ import annotations

import numpy as np

from octavo.sampling.arithmetic import exp, log


def test_exp() -> None:
    x = -np.concatenate([np.linspace(0, 1, 10_001), np.geomspace(1e-300, 699, 100_000), [0.0]])
    assert np.abs(exp(x) / np.exp(x) - 1).max() < 1e-15
    assert exp(np.zeros(1))[0] == 1.0
    assert exp(np.array([-701.0, -1e300, -np.inf])).tolist() == [exp(np.array([-700.0]))[0]] * 3


def test_log() -> None:
    near_one = 1 - np.geomspace(2.0**-33, 0.5, 10_000)
    x = np.concatenate([near_one, np.geomspace(1e-300, 1e300, 100_000), np.linspace(0.4, 2.5, 10_000)])
    x = x[x != 1.0]
    assert np.abs(log(x) / np.log(x) - 1).max() < 1e-15
    assert log(np.ones(1))[0] == 0.0
