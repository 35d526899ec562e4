"""Models larger than memory, beside the disk itself and llama.cpp: `python -m bench.streaming`."""
