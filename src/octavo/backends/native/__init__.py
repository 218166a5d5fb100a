"""The CPU backend in C++, reached through ctypes."""
