"""Integrations with frameworks and their engines, one package for each framework.

Frameworks' packages do not import each other; code that their engines share is in `plugin`.
"""
