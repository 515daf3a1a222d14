"""Whole adapters, made of the parts: one package for each engine or framework."""
