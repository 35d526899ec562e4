"""What the daemon says about itself: health, problems, events, histograms, Prometheus text.

Never a key, a salt, a token or a tenant in it.
"""
