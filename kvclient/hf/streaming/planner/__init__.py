"""Whether a request fits: shape (bytes by what they grow with) → admission (a call) → asked (generate())."""
