"""The protocol's generated messages and stubs (from proto/kvstored/v1, at build time; never edited, never committed)."""
