"""Runs batches.

runner.py     which batches this server runs, and the steps of one batch
line_jobs.py  the requests of its lines
results.py    the files with its results
"""
