"""The table of `python -m bench`: its rows, the rounds that alternate contenders, and how it is written."""
