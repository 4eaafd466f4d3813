"""Data sets, where they come from and how clients share them."""

from hetfl.data.errors import DataError

__all__ = ["DataError"]
