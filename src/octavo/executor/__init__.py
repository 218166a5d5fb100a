"""Runs the scheduler's plans on workers."""
