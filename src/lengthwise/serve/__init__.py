"""`lengthwise serve`: the page over live models.

catalog.py lists the models, session.py computes what is looked at, app.py answers requests, and server.py runs it on
this machine alone.
"""
