"""The command line: arguments, commands, what they print, fsck and completion.

Never owns state of the daemon; it asks a running one or starts one.
"""
