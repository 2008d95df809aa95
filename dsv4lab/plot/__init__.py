"""Frames in, tables and figures out: never a measurement, never torch."""
