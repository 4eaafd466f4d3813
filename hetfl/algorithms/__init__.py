"""The algorithms: one file each, which reads like its paper's pseudocode."""
