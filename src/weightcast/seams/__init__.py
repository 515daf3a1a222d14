"""The Protocols of a source, a transport, an engine and an engine's client, with their call sequences.

Third parties can implement them.
"""
