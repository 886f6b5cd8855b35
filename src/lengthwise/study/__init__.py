"""Several encodings trained, measured and drawn, and one report of it: the main job.

config.py has the options of a study, runs.py its runs; execute.py does it, results.py has what was measured, and
report.py writes it.
"""
