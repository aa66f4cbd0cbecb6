"""Decode, prefill and head operations on a paged cache; jax only, usable without the rest."""
