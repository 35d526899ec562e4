"""What is sent back, one API a module."""
