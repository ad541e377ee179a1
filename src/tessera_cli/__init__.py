"""Tessera: distil a large language model into a small one and serve it from its own engine."""

__version__ = "0.1.0"
