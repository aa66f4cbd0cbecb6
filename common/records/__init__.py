"""What a run leaves on disk, and how long work shows its progress and stops safely."""
