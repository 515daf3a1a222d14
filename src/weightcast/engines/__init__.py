"""Engines of this process: a module, a text generator. They share the gate and import nothing from each other."""
