"""From a configuration to the parts of a run, and the header that describes it."""
