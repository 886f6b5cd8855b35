"""`lengthwise serve`: the page over live models.

catalog.py lists the models, session.py computes what is looked at, and server.py answers, on this machine alone.
"""
