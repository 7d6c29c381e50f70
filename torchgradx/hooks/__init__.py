"""Our hooks on modules, parameters and nodes, and subclasses that replace modules' classes."""
