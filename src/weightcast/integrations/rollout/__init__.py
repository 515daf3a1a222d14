"""What frameworks share that bring weights to rollout workers of their own, and load them there themselves.

Here belong both ends of such a transfer: `transfer` is what a framework's class is made of, `receiving` the end of a
rollout worker, `workers` the trainer's client of all of them. No framework is imported.
"""
