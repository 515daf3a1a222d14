"""The host: free memory within cgroups, copies, devices, deadlines, resources to close in a forked child.

This code knows no tensor names, versions or peers.
"""
