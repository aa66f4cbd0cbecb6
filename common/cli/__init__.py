"""The command `sparrow`: arguments, help, and which function does the work."""
