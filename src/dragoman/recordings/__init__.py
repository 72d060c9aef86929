"""Recordings: requests with their replies, as `dragoman serve --record` writes them.

recorded_exchange   one line of a recording
outcome             what a recorded or a new response says
replay              sends the requests again
comparison          compares the outcomes
report              shows the differences
scripts             makes a configuration of the scripted engine from a recording
"""
