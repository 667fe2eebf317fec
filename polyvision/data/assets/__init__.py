"""The text that ships with the package."""
