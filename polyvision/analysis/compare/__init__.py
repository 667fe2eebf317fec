"""Comparison of runs: like settings only, paired by seed, with what is missing said."""
