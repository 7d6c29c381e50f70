"""Sites: how a probe records a module, by its kernel, by projections, or by running it again."""
