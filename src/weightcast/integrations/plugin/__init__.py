"""weightcast inside another project's engine: agreement of ranks, dry runs of the loader, undo, routes.

Code shared by engines that have their own control plane and loader. No framework is imported.
"""

from __future__ import annotations

TOKEN_VARIABLE = "WEIGHTCAST_TOKEN"
"""Environment variable of an engine's processes with the token for its weight routes and rank calls."""
HEALTH_VARIABLE = "WEIGHTCAST_HEALTH_MAX_BEHIND"
"""Environment variable of a server: by how many numbers its engine may be behind for its health routes to answer."""
