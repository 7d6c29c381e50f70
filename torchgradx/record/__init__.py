"""The passes from a forward to its backward's end, their record, and what is read from it."""
