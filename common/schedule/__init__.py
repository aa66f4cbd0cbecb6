"""How many pages a query may read at which position: files, presets, search, validation."""
