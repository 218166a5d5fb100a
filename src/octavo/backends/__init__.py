"""The devices' interpreters of programs."""
