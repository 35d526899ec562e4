"""What the machine itself can do: memcpy and the best non-temporal copy, on shared memory like ours."""
