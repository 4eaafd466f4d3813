"""Models and their layers."""
