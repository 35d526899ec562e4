"""Where blocks lie: pools of shared memory and the disk under them.

Never reads a block; bytes are moved by native code.
"""
