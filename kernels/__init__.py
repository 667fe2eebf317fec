"""Kernels of polyvision; imported as ``polyvision.kernels``.

Each function validates nothing (``polyvision.functional`` does) and picks the fastest backend for
the device of its input.
"""

from polyvision.kernels.reference import poly_norm, poly_relu

__all__ = ["poly_norm", "poly_relu"]
