"""What decoding costs in bytes, seconds and eFLOPs, by model and chip."""
