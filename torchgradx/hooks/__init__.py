"""Our hooks on modules, parameters and nodes, and the classes that stand in for modules' own."""
