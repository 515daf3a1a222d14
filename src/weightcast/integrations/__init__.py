"""weightcast inside other people's engines, and their clients: one package for each framework.

Frameworks don't know of each other; what their engines have in common is in `plugin`.
"""
