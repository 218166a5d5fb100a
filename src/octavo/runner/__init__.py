"""Owns every tensor; runs steps and samples."""
