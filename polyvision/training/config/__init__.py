"""Configuration: the keys, their types and checks, composed by Hydra."""
