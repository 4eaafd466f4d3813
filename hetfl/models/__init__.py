"""Models of the three papers."""
