"""Record what a backend computes, and find the first quantity in which two backends differ."""
