"""Reducing contributions in a fixed order: kernels over byte arrays, and which cells exist."""
