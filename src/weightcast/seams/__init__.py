"""What a source, a transport, an engine and an engine's client must do: Protocols, and the order of their calls.

Here belongs what a third party implements. No code that does anything.
"""
