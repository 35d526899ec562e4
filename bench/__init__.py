"""Side-by-side measurements: kvstored and what else installs, alternating within one run.

Nothing here passes or fails. Every contender runs in a process of its own (its own virtual environment
where it needs one) and answers a few JSON lines; see peers/contract.py for the child's end and
compare/driver.py for this end.
"""
