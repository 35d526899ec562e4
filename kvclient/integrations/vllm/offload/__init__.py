"""The two ways in which vLLM's own OffloadingConnector uses the store: as what it offloads to (spec), and
beneath its memory on the host (tier)."""
