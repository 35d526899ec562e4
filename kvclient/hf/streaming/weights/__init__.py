"""Where weights lie while they have memory: of a layer's modules, of an embedding and of a head."""
