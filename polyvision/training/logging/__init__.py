"""What is logged and printed of a run."""
