"""Files of weights, loading them, and networks built without any."""
