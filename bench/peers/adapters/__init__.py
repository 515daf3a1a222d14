"""One module for each library. A function of it is a way: a context manager that connects one end and gives `update`.

Both ends enter it at the same time, each in a process of its own; `update(step)` is then called at both ends at the
same time, and returns at the trainer when it has sent, at the engine when it has loaded, everything of this step.
"""
