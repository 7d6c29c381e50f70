"""What a graph shows without the modules that made it: its nodes, and whose their rows are."""
