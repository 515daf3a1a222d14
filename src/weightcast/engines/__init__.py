"""What serves weights in this process: a module, a text generator. Engines share the gate, not each other's code."""
