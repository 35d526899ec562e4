"""Where a streamed layer is computed, by what it costs on either side."""
