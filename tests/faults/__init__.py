"""What goes wrong around a run."""
