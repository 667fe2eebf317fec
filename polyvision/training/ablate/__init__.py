"""Ablations: which runs a study needs, training them, the report."""
