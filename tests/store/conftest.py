from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _obstore_is_up() -> None:
    """Obstore's first call opens descriptors and starts threads that stay until the process ends: no test's leak."""
    import obstore
    from obstore.store import MemoryStore

    obstore.put(MemoryStore(), "first", b"")
