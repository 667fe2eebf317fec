"""Kernels of polyvision; imported as ``polyvision.kernels``.

Each function validates nothing (``polyvision.functional`` does) and picks the fastest backend for
the device of its input.
"""

from polyvision.kernels.autograd import poly_norm, poly_relu
from polyvision.kernels.composed import poly_norm_apply, poly_norm_stats, polycom
from polyvision.kernels.environment import describe
from polyvision.kernels.namesake import step_aside
from polyvision.kernels.selection import BACKENDS, use_backend

from polyvision.recompute import ffn_down

__all__ = [
    "BACKENDS",
    "describe",
    "ffn_down",
    "poly_norm",
    "poly_norm_apply",
    "poly_norm_stats",
    "poly_relu",
    "polycom",
    "use_backend",
]

if __name__ == "kernels":  # not polyvision.kernels: found first by a program run in the repository
    step_aside()
