"""The machine: free memory within cgroups, copies without teams of threads, what to close in a forked child.

Here belongs what asks or uses the host alone. Nothing here knows of tensors' names, versions or peers.
"""
