"""Where weights come from: one module for each kind of `Source`. They don't import each other."""
