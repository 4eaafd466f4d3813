"""The algorithms: one file each, which reads as its paper's box."""
