"""The coding agents behind `dragoman launch` and `dragoman probe`.

table               the agents and their settings: declarations
setup               the settings of an agent for one server and one model
sample_requests     requests of agents, with the size and structure of recorded ones
probe               runs checks, and gives a verdict
prompt_checks       the size of the prompt, what the chat template keeps, and what the next request repeats
generation_checks   tool calls, thinking and a task; `CHECKS` has all checks
"""
