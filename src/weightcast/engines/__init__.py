"""Engines in this process: a module, a text generator. They share the gate and do not import each other."""
