"""Triton kernels of block-sparse attention for GPU; torch and triton only."""
