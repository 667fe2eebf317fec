"""Training: configuration, Lightning modules, run folders and resume."""
