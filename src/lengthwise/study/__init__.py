"""Several encodings trained, measured and drawn, and one report of it: the main job.

config.py says what a study is, parts.py which runs it has, study.py does it, report.py tells of it.
"""
