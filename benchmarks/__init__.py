"""Speed, measured against named peers."""
