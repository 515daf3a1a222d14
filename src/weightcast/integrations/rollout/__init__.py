"""Common code for frameworks that have their own rollout workers and load the received weights themselves.

`transfer` has the class on which a framework's integration is based, and the trainer's client of all rollout workers;
`receiving` a rollout worker's end. No framework is imported.
"""
