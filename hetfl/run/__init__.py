"""Runs of experiments: training, checkpoints, logs, curves and searches.

Nothing else in `hetfl` imports this package.
"""
