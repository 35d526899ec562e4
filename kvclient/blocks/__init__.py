"""The text side of the store: chunks, keys and layouts. Never opens a connection and never maps memory."""
