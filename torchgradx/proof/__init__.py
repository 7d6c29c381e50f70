"""Nothing is silently wrong: where the samples are, and whether the record is all there is."""
