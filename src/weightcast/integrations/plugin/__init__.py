"""weightcast inside another project's engine: ranks that agree on an install, trials of a loader, undo, routes.

Here belongs what engines with a control plane and a loader of their own have in common. No framework is imported.
"""

from __future__ import annotations

TOKEN_VARIABLE = "WEIGHTCAST_TOKEN"
"""The environment variable of an engine's processes that has the token for its weight routes and rank calls."""
