"""One file per peer: how it is started, and what each measured operation is in its own words."""
