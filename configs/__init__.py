"""Hydra configuration files; imported as ``polyvision.configs``."""
