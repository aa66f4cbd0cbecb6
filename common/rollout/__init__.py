"""The host's half of sampling: slots, pages of the KV cache, and reproducible noise."""
