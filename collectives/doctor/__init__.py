"""``python -m collectives.doctor``: check an install and the process's surroundings.

It prints a finding for each check and the line that fixes what is wrong. Its own process imports
neither torch nor an extension, so it runs where these are missing or broken.
"""

__all__ = []
