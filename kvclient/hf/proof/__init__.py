"""What is proven of a model before the store serves it, and what is measured of it when asked.

Never serves a call of the user's: attach() does, and calls this.
"""
