"""Record what a backend computes, and find where two backends part."""
