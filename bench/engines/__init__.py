"""What the store does for other projects' engines, in the environments that `make engines` made."""
