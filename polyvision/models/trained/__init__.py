"""Trained networks: description, loading, export."""
