"""Common code for frameworks that have rollout workers of their own and load the received weights themselves.

Both ends of such a transfer: `transfer` has the base of a framework's own class, `receiving` the end of a rollout
worker, `workers` the trainer's client of all rollout workers. No framework is imported.
"""
