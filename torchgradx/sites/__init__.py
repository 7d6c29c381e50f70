"""Where a probe touches a module: by a kernel, by parts that have one, or by running it again."""
