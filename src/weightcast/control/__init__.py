"""The control plane: typed records, the client on the trainer's side, the reference server's routes."""
