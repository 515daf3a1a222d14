"""weightcast inside somebody else's engine: ranks that agree on an install, trials of a loader, undo, routes.

Here belongs what engines with a control plane and a loader of their own have in common. No framework is imported.
"""
