"""The command `sparrow`: arguments, help, and the functions that run the commands."""
