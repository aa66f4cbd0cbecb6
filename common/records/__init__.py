"""What a run leaves on disk, and how long work shows progress and stops safely."""
