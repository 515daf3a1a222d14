"""weightcast as a guest in an engine with a control plane and a loader of its own: what all such engines share."""
