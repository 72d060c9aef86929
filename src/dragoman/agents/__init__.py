"""The coding agents behind `dragoman launch` and `dragoman probe`.

table               the agents and their settings: declarations
setup               the settings of an agent for one server and one model
"""
