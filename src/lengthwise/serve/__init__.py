"""The page over live models: `lengthwise serve`.

library.py knows which models there are, looks.py holds what was looked at, app.py answers, limits.py keeps it from
being overrun, and server.py runs it on this machine alone.
"""
