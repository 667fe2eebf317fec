"""Models: timm networks with any activation, and the transformer."""
