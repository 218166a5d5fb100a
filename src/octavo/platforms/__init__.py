"""Device probing; the only place that asks the machine."""
