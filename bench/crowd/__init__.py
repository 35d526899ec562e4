"""The core under a crowd: many pins, many sessions, many processes, a million blocks."""
