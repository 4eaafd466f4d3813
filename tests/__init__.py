"""Tests; modules here import one another as `tests.NAME`."""
