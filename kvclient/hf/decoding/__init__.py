"""What happens at each new token: the recorded step, and what hears the token.

Never looks anything up in the store.
"""
