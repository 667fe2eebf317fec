"""The C++ backend for CPU tensors."""
