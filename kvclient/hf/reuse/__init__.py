"""What is no prefix: which stored tokens may stand elsewhere, which are computed again, and how far that is
from a full prefill.
"""
