"""Between a forward and the end of its backward: passes, and the record that they make."""
