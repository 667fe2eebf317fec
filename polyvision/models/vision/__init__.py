"""timm networks with any activation."""
