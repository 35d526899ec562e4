"""What lies on the disk: a checkpoint's files, their headers, and the rearranged file beside them."""
