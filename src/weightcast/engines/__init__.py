"""Where weights land: one module for each kind of `Engine`. They don't import each other."""
